"""What the flags of `jaxrl train` become."""

from __future__ import annotations

import pytest

from jaxrl.cli import parsing, train


class Joined(Exception):
    """Ends the command where processes would meet."""


def test_train_gives_the_watchdog_the_times_of_its_flags(repo_root, monkeypatch):
    def join(*_, watch, timeout_s, agree_timeout_s, **__):
        raise Joined(watch.report_after_s, watch.exit_after_s, agree_timeout_s, timeout_s)

    monkeypatch.setattr(train.distributed, "join", join)
    flags = [f"--config={repo_root}/configs/tiny.py", "--hang-report-s=7", "--hang-exit-s=20"]
    args = parsing.parse_arguments(parsing.COMMANDS["train"], [*flags, "--join-timeout-s=3"])

    with pytest.raises(Joined) as met:
        train.run(args.config, args)

    assert met.value.args == (7.0, 20.0, 20.0, 3.0)
