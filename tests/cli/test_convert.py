"""What `convert` leaves in a folder: all of a model, or nothing that looks like one."""

from __future__ import annotations

import pytest

from jaxrl.cli.convert import _PARTS, _refuse_mixing, _staged
from jaxrl.errors import OutputError


def _write(stage):
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (stage / name).write_text(name)


def test_staged_files_come_at_the_end_into_a_folder_with_others(tmp_path):
    (tmp_path / "README.md").write_text("mine")

    with _staged(tmp_path) as stage:
        _write(stage)
        assert not (tmp_path / "config.json").exists()

    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["README.md", "config.json", "model.safetensors", "tokenizer.json"]


def test_staged_failure_leaves_no_folder(tmp_path):
    with pytest.raises(OutputError, match="cannot write --to=.*No space left"):
        with _staged(tmp_path / "a") as stage:
            _write(stage)
            raise OSError(28, "No space left on device")

    assert not (tmp_path / "a").exists()


def test_staged_second_writer_of_a_folder_is_refused_and_changes_nothing(tmp_path):
    with pytest.raises(OutputError, match=r"^\S+ already holds config\.json; choose another --to"):
        with _staged(tmp_path) as late:
            (late / "config.json").write_text("late")
            (late / "generation_config.json").write_text("late")
            with _staged(tmp_path) as early:
                _write(early)

    assert (tmp_path / "config.json").read_text() == "config.json"
    assert len(list(tmp_path.iterdir())) == 3


def test_staged_into_a_file_is_output_error(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(OutputError, match="cannot write --to=.*file"):
        with _staged(tmp_path / "file"):
            pytest.fail("there is no folder to write to")


@pytest.mark.parametrize("name", _PARTS)
def test_refuse_mixing_names_what_readers_would_take_together(tmp_path, name):
    (tmp_path / name).symlink_to("nowhere")

    with pytest.raises(OutputError, match=f"already holds {name}; choose another --to"):
        _refuse_mixing(tmp_path)
