"""`jaxrl debug collectives` shows what a run recorded, or what the programs of a config send."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import pytest
from distributed import hlo_texts

from jaxrl.cli.main import main
from jaxrl.config.files import load_config_file
from jaxrl.config.serialize import to_record
from jaxrl.distributed.record import FILE, read_programs, record_program
from jaxrl.errors import DataError

CONFIG = """
from jaxrl.config import *

def get_config():
    return ExperimentConfig(
        name="small",
        model=ModelConfig(
            n_layers=1, d_model=16, n_heads=2, n_kv_heads=2, head_dim=8, mlp_dim=32,
            max_length=16, vocab_size=96,
        ),
        data=DataConfig(source="jsonl", path="no data", max_prompt_tokens=8),
        mesh=MeshConfig(data=1, fsdp=2, tensor=2),
        train=TrainConfig(batch_size=4),
        rollout=RolloutConfig(max_new_tokens=8, slots=4, group_size=2),
    )
"""


@pytest.fixture(autouse=True)
def started():
    """The command chooses the number of devices where it starts JAX; later tests need theirs."""
    jax.devices()


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.py"
    path.write_text(CONFIG)
    return str(path)


@pytest.fixture
def run_folder(tmp_path, config):
    """The folder of a run that has recorded two programs."""
    logs = tmp_path / "run" / "logs"
    logs.mkdir(parents=True)
    (logs.parent / "config.json").write_text(json.dumps(to_record(load_config_file(config))))
    record_program(logs, "train step", hlo_texts.all_reduce("{{0,2},{1,3}}"), ["[0] f32[8,128]"])
    record_program(logs, "decode", hlo_texts.loop())
    return str(logs.parent)


def test_debug_collectives_of_config_compiles_for_its_mesh(config, capsys):
    code = main(["debug", "collectives", config, "--program=train", "--json"])

    (program,) = json.loads(capsys.readouterr().out)
    assert code == 0
    assert program["program"] == "train"
    kinds = {one["kind"] for one in program["collectives"]}
    assert {"all-gather", "all-reduce"} <= kinds
    ids = {i for one in program["collectives"] for group in one["groups"] for i in group}
    assert ids == {0, 1, 2, 3}


def test_debug_collectives_of_run_shows_what_it_recorded(run_folder, capsys):
    code = main(["debug", "collectives", run_folder])

    out = capsys.readouterr().out
    assert code == 0
    assert "train step: 1 collectives in a run, 4,096 bytes sent by each device" in out
    assert "inputs: 1, the last [0] f32[8,128]" in out
    assert out.splitlines()[3].split() == [
        "0",
        "1",
        "all-reduce",
        "sum",
        "4,096",
        "fsdp",
        "f32[8,128]",
    ]
    assert "decode: 3 collectives" in out


def test_debug_collectives_of_run_without_a_record_says_so_before_it_compiles(run_folder, capsys):
    (Path(run_folder) / "logs" / FILE).unlink()

    code = main(["debug", "collectives", run_folder, "--program=trian"])

    assert code == 2
    assert "collectives.json is not there: a run of one process records" in capsys.readouterr().err


def test_debug_collectives_names_no_axis_for_groups_of_one_device(run_folder, capsys):
    record_program(Path(run_folder) / "logs", "alone", hlo_texts.all_reduce("{{0},{1},{2},{3}}"))

    main(["debug", "collectives", run_folder, "--program=alone"])

    head, _, row = capsys.readouterr().out.splitlines()
    assert head == "alone: 1 collectives in a run, 0 bytes sent by each device"
    assert row.split()[-2:] == ["none", "f32[8,128]"]


def test_debug_collectives_of_one_recorded_program(run_folder, capsys):
    main(["debug", "collectives", run_folder, "--program=decode", "--json"])

    (program,) = json.loads(capsys.readouterr().out)
    assert (program["program"], program["collectives"][0]["times"]) == ("decode", 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["collectives"], "debug takes what and target, got 1"),
        (["collective", "{config}"], "did you mean 'collectives'"),
        (["collectives", "{config}", "--config.mesh.data=-1"], "mesh.data=-1 takes the rest"),
        (["collectives", "{config}", "--program=trian"], "must be one of ['decode', 'prefill'"),
        (["collectives", "{config}", "--devices=3"], "(product 4)"),
        (["collectives", "{config}", "--devices=9999999"], "at most 32768 devices, not 9999999"),
        (["collectives", "{config}", "--config.mesh.data=99999"], "32768 devices, not 399996"),
        (["collectives", "no such file.py"], "no such file.py"),
    ],
)
def test_debug_bad_arguments_are_one_line_and_exit_code_two(arguments, message, config, capsys):
    code = main(["debug", *(argument.format(config=config) for argument in arguments)])

    captured = capsys.readouterr()
    assert code == 2
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_debug_unknown_program_of_run_is_named(run_folder, capsys):
    assert main(["debug", "collectives", run_folder, "--program=x"]) == 2
    assert "must be one of ['decode', 'train step']" in capsys.readouterr().err


def test_record_program_replaces_same_and_survives_damage(tmp_path):
    text = hlo_texts.all_reduce("{{0,1}}")
    for inputs in (["a"], ["b"], ["a"]):
        record_program(tmp_path, "step", text, inputs)
    assert [program.inputs for program in read_programs(tmp_path)] == [("b",), ("a",)]

    for damage in ("", "{}", "[1]", '[{"name": "x"}]', "[" * 100_000):
        (tmp_path / FILE).write_text(damage)
        with pytest.raises(DataError, match=FILE):
            read_programs(tmp_path)
    record_program(tmp_path, "step", text)
    assert len(read_programs(tmp_path)) == 1
    record_program(tmp_path / "missing", "step", text)  # a warning


@pytest.mark.parametrize(
    "damage",
    [
        {"kind": 3},
        {"reduction": 4},
        {"groups": [[-1, 0]]},
        {"groups": [["0", "1"]]},
        {"groups": [[0, 10**12]]},
        {"groups": [[]]},
        {"shapes": ["ab"]},
        {"shapes": [[1.5]]},
        {"dtypes": []},
        {"dtypes": [32]},
        {"trips": None},
        {"trips": True},
    ],
    ids=str,
)
def test_debug_collectives_of_damaged_record_is_one_line_with_the_file(run_folder, damage, capsys):
    path = Path(run_folder) / "logs" / FILE
    programs = json.loads(path.read_text())
    programs[0]["collectives"][0] |= damage
    path.write_text(json.dumps(programs))

    code = main(["debug", "collectives", run_folder])

    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    assert f"{path} is not a list of programs" in captured.err
    assert captured.err.count("\n") == 1
