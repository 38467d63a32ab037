"""Loggers: component and rank on every record, nothing done to a host application's root."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from jaxrl.errors import ConfigError, OutputError
from jaxrl.observe.logger import get_logger, reset_logging, setup_logging


@pytest.fixture(autouse=True)
def _clean_logging():
    yield
    reset_logging()


def test_setup_logging_record_reaches_stderr_and_file_with_component_and_rank(tmp_path, capsys):
    file = tmp_path / "run.log"

    setup_logging("INFO", rank=3, file=file)
    get_logger("rollout").info("hello %d", 7)
    get_logger("rollout").debug("hidden")

    for text in (capsys.readouterr().err, file.read_text()):
        assert "I r3 rollout] hello 7" in text
        assert "hidden" not in text


def test_setup_logging_called_again_replaces_and_does_not_double(capsys):
    setup_logging("INFO")
    setup_logging("WARNING", rank=1)

    get_logger("train").info("quiet")
    get_logger("train").warning("once")

    assert capsys.readouterr().err.count("once") == 1


def test_setup_logging_root_logger_of_the_host_is_untouched():
    root = logging.getLogger()
    before = (list(root.handlers), root.level, list(root.filters))

    setup_logging("DEBUG")

    assert (list(root.handlers), root.level, list(root.filters)) == before


def test_get_logger_without_setup_host_handlers_see_component(caplog):
    with caplog.at_level(logging.INFO, logger="jaxrl"):
        get_logger("inference").info("seen")

    assert (caplog.records[0].component, caplog.records[0].rank) == ("inference", 0)


def test_get_logger_is_the_same_object_and_has_no_handlers():
    logger = get_logger("weights")

    assert get_logger("weights") is logger
    assert logger.handlers == []
    assert len(logger.filters) == 1


def test_import_attaches_no_handlers():
    code = "import logging, jaxrl.observe.logger as l; l.get_logger('x'); n = logging.getLogger"
    code += "; assert not n().handlers and not n('jaxrl').handlers and not n('jaxrl.x').handlers"

    subprocess.run([sys.executable, "-c", code], check=True)


def test_setup_logging_unknown_level_names_the_known():
    with pytest.raises(ConfigError, match=r"log_level='LOUD'.*INFO"):
        setup_logging("LOUD")


def test_setup_logging_file_that_cannot_be_opened_is_output_error(tmp_path):
    with pytest.raises(OutputError, match="cannot write the log file"):
        setup_logging("INFO", file=tmp_path / "none" / "run.log")
