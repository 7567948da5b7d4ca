"""Training state, optimizer, SFT and MGPO steps, and the loop around them."""
