"""Runs one stage in a process of its own: python -m tests.stages.run_stage CONFIG.json WORKDIR [STEP]

With STEP the process kills itself (SIGKILL) while it logs the step after that one. STAGE_PROCESS=ADDRESS,COUNT,INDEX
in the environment makes it one of several processes of a run.
"""

import json
import os
import signal
import sys

import jax
from ml_collections import ConfigDict

from vibethinker_jax.stages import run_stage
from vibethinker_jax.training.metrics_log import MetricsLog


def main() -> None:
    config, workdir, *kill = sys.argv[1:]
    if "STAGE_PROCESS" in os.environ:
        address, count, index = os.environ["STAGE_PROCESS"].split(",")
        jax.distributed.initialize(address, int(count), int(index))
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
