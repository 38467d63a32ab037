"""One process of a training job: `host_worker.py SCENARIO PORT COUNT INDEX FOLDER [OPTION…]`.

It runs the config that lies as config.json in the folder above, and writes what came out.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from jaxrl import distributed
from jaxrl.config.serialize import load_config, to_dict


def main() -> None:
    """Join, train, say how it ended."""
    scenario, port, count, index, folder = sys.argv[1:6]
    config = load_config(Path(folder).parent / "config.json")
    if scenario == "apart":
        # Relative paths name other files on each host.
        os.chdir(Path(folder, index))
    with distributed.join(
        f"127.0.0.1:{port}",
        int(count),
        int(index),
        fingerprint={"config": to_dict(config)},
    ):
        from jaxrl.orchestration.rl import RLTrainer
        from jaxrl.orchestration.sft import SFTTrainer

        if scenario == "sft":
            with SFTTrainer(config) as trainer:
                version = trainer.fit()
                frozen = None
        else:
            with RLTrainer(config) as trainer:
                if scenario == "interrupted" and int(index) == 1:
                    _interrupt_after(trainer, 2)
                if scenario == "fails" and int(index) == 1:
                    _fail_after(trainer, 2)
                frozen = trainer.fit()["after"].metrics()
                version = trainer.version
    sys.stdout.write(json.dumps({"version": str(version), "evaluation": frozen}) + "\n")


def _interrupt_after(trainer, updates: int) -> None:
    """A signal comes to this process alone, in the middle of an update."""
    update = trainer._update

    def interrupted(groups, collector):
        if trainer.updates == updates:
            os.kill(os.getpid(), signal.SIGTERM)
        update(groups, collector)

    trainer._update = interrupted


def _fail_after(trainer, updates: int) -> None:
    """This process alone cannot collect its share."""
    collate = trainer._next_batch

    def failing(collector):
        if trainer.updates == updates:
            collector.close()
        return collate(collector)

    trainer._next_batch = failing


if __name__ == "__main__":
    main()
