"""Runs one stage in a process of its own: python -m tests.stages.run_stage CONFIG.json WORKDIR [STEP]

With STEP the process kills itself (SIGKILL) while it logs the step after that one.
"""

import json
import os
import signal
import sys

from ml_collections import ConfigDict

from vibethinker_jax.stages import run_stage
from vibethinker_jax.training.metrics_log import MetricsLog


def main() -> None:
    config, workdir, *kill = sys.argv[1:]
    if kill:
        written = MetricsLog.write

        def write(log, step, values):
            written(log, step, values)
            if step == int(kill[0]) + 1:
                os.kill(os.getpid(), signal.SIGKILL)

        MetricsLog.write = write
    with open(config) as stream:
        run_stage(ConfigDict(json.load(stream)), workdir)


if __name__ == "__main__":
    main()
