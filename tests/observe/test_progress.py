"""The progress display on a terminal and elsewhere, and the summary table."""

from __future__ import annotations

import io

import pytest

from jaxrl.observe import names
from jaxrl.observe.progress import Progress, format_duration, format_line, format_summary

VALUES = {
    names.REWARD: 0.25,
    names.ACCURACY: 0.5,
    names.STALENESS: 0.75,
    names.ROLLOUT_SPEED: 12345.6,
    names.TRAIN_SPEED: 800.0,
}


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_format_line_shows_every_column_and_the_time_left():
    line = format_line(3, 10, VALUES, 75.0)

    assert line == (
        "step 3/10  reward 0.250  accuracy 50.0%  staleness 0.75  "
        "rollout tok/s 12,346  train tok/s 800  left 1m15s"
    )


def test_format_line_without_values_shows_the_step():
    assert format_line(1, 2, {}, None) == "step 1/2"


def test_progress_may_count_other_things_than_steps():
    stream = io.StringIO()
    progress = Progress(3, stream=stream, unit="prompt")

    progress.write(3, {names.ACCURACY: 1.0}, 0.0)
    progress.close()

    assert stream.getvalue() == "prompt 3/3  accuracy 100.0%\n"


@pytest.mark.parametrize(
    ("seconds", "text"), [(4.4, "4s"), (59.9, "1m00s"), (75, "1m15s"), (3700, "1h01m")]
)
def test_format_duration(seconds, text):
    assert format_duration(seconds) == text


def test_progress_elsewhere_writes_plain_lines_at_intervals_and_the_last(capsys):
    stream, clock = io.StringIO(), Clock()
    progress = Progress(10, stream=stream, interval_s=10, clock=clock)

    for step in range(1, 11):
        clock.now = 4.0 * step
        progress.write(step, {names.REWARD: step / 10}, 0.0)
    progress.close()

    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/10", "4/10", "7/10", "10/10"]
    assert lines[1] == "step 4/10  reward 0.400  left 24s"
    assert "\x1b" not in stream.getvalue()
    assert capsys.readouterr() == ("", "")


def test_progress_closed_early_shows_the_last_step():
    stream, clock = io.StringIO(), Clock()
    progress = Progress(10, stream=stream, clock=clock)

    progress.write(1, {}, 0.0)
    progress.write(2, {}, 0.0)
    progress.close()

    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["1/10", "2/10"]


def test_progress_after_resume_estimates_from_its_own_steps():
    stream, clock = io.StringIO(), Clock()
    progress = Progress(100, stream=stream, interval_s=0, clock=clock)

    progress.write(90, {}, 0.0)
    clock.now = 10.0
    progress.write(95, {}, 0.0)

    lines = stream.getvalue().splitlines()
    assert "left" not in lines[0]
    assert "left 10s" in lines[1]


def test_progress_slower_phase_soon_counts_alone():
    stream, clock = io.StringIO(), Clock()
    progress = Progress(200, stream=stream, interval_s=0, clock=clock)

    for step in range(1, 101):
        clock.now += 100.0 if step == 1 else 0.1 if step <= 50 else 2.0
        progress.write(step, {}, 0.0)

    assert stream.getvalue().splitlines()[-1].endswith("left 3m20s")


def test_progress_metric_missing_in_a_step_keeps_its_value():
    stream, clock = io.StringIO(), Clock()
    progress = Progress(9, stream=stream, interval_s=0, clock=clock)

    progress.write(1, {names.ACCURACY: 0.5}, 0.0)
    progress.write(2, {}, 0.0)

    assert "accuracy 50.0%" in stream.getvalue().splitlines()[1]


def test_progress_on_a_terminal_redraws_one_line():
    stream = Terminal()
    progress = Progress(3, stream=stream)

    for step in (1, 2, 3):
        progress.write(step, VALUES, 0.0)
    progress.close()

    assert "step 3/3  reward 0.250  accuracy 50.0%" in stream.getvalue()
    assert "\x1b[" in stream.getvalue()


def test_format_summary_without_a_before_shows_the_result_alone():
    text = format_summary(None, {"accuracy": 0.5, "length": 10.0}, title="eval")

    assert text.splitlines() == [
        "eval      result",
        "----------------",
        "accuracy     0.5",
        "length        10",
    ]


def test_format_summary_aligns_and_shows_the_change():
    text = format_summary(
        {"accuracy": 0.125, "length": 10.0}, {"accuracy": 0.5, "reward": 1.0}, title="eval"
    )

    assert text.splitlines() == [
        "eval      before  after  change",
        "-------------------------------",
        "accuracy   0.125    0.5  +0.375",
        "length        10      -       -",
        "reward         -      1       -",
    ]
