"""The planner: compiles a configuration's programs for TPUs that are not there, and adds up what they cost."""
