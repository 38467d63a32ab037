"""The command line: what is parsed, what is refused, and how soon."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import types

import pytest

import jaxrl
from jaxrl.cli import main as cli
from jaxrl.cli import parsing
from jaxrl.config import TrainConfig, load_config_file, save_config
from jaxrl.config.schema import Deprecated, leaf_fields
from jaxrl.errors import CheckpointError, ConfigError, DataError, RequestError


@pytest.fixture
def tiny(repo_root) -> str:
    """Flag that names the shipped tiny config."""
    return f"--config={repo_root / 'configs' / 'tiny.py'}"


@pytest.fixture
def run_dir(repo_root, tmp_path) -> str:
    """Folder with the config.json of a run."""
    save_config(load_config_file(repo_root / "configs" / "tiny.py"), tmp_path / "config.json")
    return str(tmp_path)


@pytest.fixture
def ran(monkeypatch):
    """Command modules replaced by ones that record what they receive: a list of the arguments."""
    received: list[tuple] = []

    def load(name: str) -> types.SimpleNamespace:
        return types.SimpleNamespace(run=lambda *args: received.append((name, *args)) or 0)

    monkeypatch.setattr(cli, "importlib", types.SimpleNamespace(import_module=load))
    return received


@pytest.fixture
def failing(monkeypatch):
    """Function error -> from now on every command raises it."""

    def install(error: BaseException) -> None:
        def run(*_: object) -> int:
            raise error

        load = types.SimpleNamespace(import_module=lambda _: types.SimpleNamespace(run=run))
        monkeypatch.setattr(cli, "importlib", load)

    return install


def parse(command: str, *argv: str) -> parsing.Arguments:
    """Arguments of a command -> the record."""
    return parsing.parse_arguments(parsing.find_command(command), argv)


def test_parse_train_overrides_are_applied_in_every_spelling(tiny):
    args = parse(
        "train",
        tiny,
        "--config.rollout.max_staleness=0",
        "--config.model.n_layers",
        "3",
        "--config.mesh.data",
        "-1",
        "--noconfig.observe.plots",
        "--config.model.qk_norm",
        "--config.observe.progress=false",
        '--config.data.task_options={"min_word_len": 4}',
        "--config.train.steps=1",
        "--config.train.steps=2",
    )

    config = args.config
    assert args.command == "train"
    assert (config.rollout.max_staleness, config.model.n_layers, config.mesh.data) == (0, 3, -1)
    assert (config.observe.plots, config.observe.progress, config.model.qk_norm) == (
        False,
        False,
        True,
    )
    assert config.data.task_options == {"min_word_len": 4}
    assert config.train.steps == 2  # the last one wins
    assert args.overrides["train.steps"] == "2"


def test_parse_flagfile_is_read(tiny, tmp_path):
    (tmp_path / "more.flags").write_text("--config.train.steps=3\n")

    assert parse("train", tiny, f"--flagfile={tmp_path / 'more.flags'}").config.train.steps == 3


def test_parse_eval_overrides_apply_to_the_config_of_the_run(run_dir):
    args = parse("eval", "--run", run_dir, "--version=3", "--config.eval.size=4")

    assert args.options == parsing.EvalOptions(run=run_dir, version=3)
    assert args.config.eval.size == 4
    assert args.config.name == "tiny"


def test_parse_generate_options_left_open_come_from_the_run(run_dir):
    args = parse("generate", "what is up?", "--run", run_dir)

    assert args.options == parsing.GenerateOptions(
        prompt="what is up?",
        run=run_dir,
        version=-1,
        temperature=args.config.eval.temperature,
        max_new_tokens=args.config.rollout.max_new_tokens,
        seed=0,
        n=1,
    )


def test_parse_generate_flags_may_stand_before_and_after_the_prompt(run_dir):
    flags = ["--temperature=0.5", "--max-new-tokens=4", "--seed=7", "--n=2"]
    args = parse("generate", *flags, "hi", f"--run={run_dir}")

    options = args.options
    assert (options.prompt, options.temperature, options.max_new_tokens) == ("hi", 0.5, 4)
    assert (options.seed, options.n) == (7, 2)


@pytest.mark.parametrize("command", ["train", "plan"])
def test_config_file_may_be_named_without_its_flag(tiny, command):
    assert parse(command, tiny.removeprefix("--config=")) == parse(command, tiny)


def test_config_file_that_is_named_twice_is_refused(tiny):
    with pytest.raises(ConfigError, match="unexpected argument 'other.py'"):
        parse("plan", tiny, "other.py")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--config.train.stps=3"], "train.stps does not exist; did you mean train.steps?"),
        (["--config.trian.steps=3"], "trian does not exist; did you mean train?"),
        (["--config.train=3"], "train is a section: set its fields, for example train.steps"),
        (["--config.train.steps=x"], "train.steps='x' must be an integer"),
        (["--config.train.steps"], "Missing value for flag --config.train.steps"),
        (["--config.observe.plots=no"], "observe.plots='no' must be true or false"),
        (["--config.observe.plots", "no"], "unexpected argument 'no'; values of true-or-false"),
        (["--config.train.batch_size=9"], "train.batch_size=9 must be a multiple of rollout.gro"),
        (["--noconfig.train.steps"], "unknown flag --noconfig.train.steps; see jaxrl train --help"),
        (["--confg=x"], "unknown flag --confg; did you mean --config?"),
        (["--flagfile=none"], "flagfile"),
        (["extra"], "unexpected argument 'extra'"),
    ],
)
def test_parse_train_mistake_message_names_it(tiny, argv, message):
    with pytest.raises(ConfigError) as error:
        parse("train", tiny, *argv)

    assert message in str(error.value)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["train"], "--config is required: Python file with get_config()"),
        (["train", "--config=none.py"], "none.py: cannot be read: No such file"),
        (["eval"], "exactly one of --run and --weights must be given; neither is given"),
        (["convert", "--run=a"], "--to is required: folder to write"),
        (["convert", "--to=a"], "exactly one of --run and --weights must be given; neither is"),
        (["convert", "--to=a", "--run=b", "--weights=c"], "must be given; both are given"),
        (["eval", "--run=none"], "none/config.json: cannot be read: No such file"),
        (["generate", "--run=x"], "generate takes one prompt (in quotes), got 0"),
        (["generate", "two", "words", "--run=x"], "generate takes one prompt (in quotes), got 2"),
        (["generate", " ", "--run=x"], "--prompt=' ' must be non-empty"),
        (["generate", "hi", "--run=x", "--n=0"], "--n=0 must be between 1 and 1000"),
        (["generate", "hi", "--run=x", "--max-new-tokens=0"], "--max-new-tokens=0 must be at"),
        (["generate", "hi", "--run=x", "--max-new-tokns=9"], "did you mean --max-new-tokens?"),
        (["generate", "hi", "--run=x", "--temperature=hot"], "--temperature='hot' must be a fin"),
        (["generate", "hi", "--run=x", "--version=-2"], "--version=-2 must be at least -1"),
        (["tran"], "unknown command 'tran'; did you mean train?"),
        (["xyz"], "unknown command 'xyz'; there are train, eval, generate, serve, convert"),
    ],
)
def test_main_mistake_is_one_line_and_exit_code_2(argv, message, capsys):
    assert cli.main(argv) == 2

    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("jaxrl: error: ")
    assert message in err
    assert err.count("\n") == 1


def test_main_another_model_for_the_weights_of_a_run_is_refused(run_dir, capsys):
    flags = ["generate", "hi", f"--run={run_dir}", "--config.model.lora_alpha=64"]

    assert cli.main(flags) == 2

    message = "model.lora_alpha=64.0 must be 16.0, as in the run whose weights these are"
    assert message in capsys.readouterr().err


def test_main_several_greedy_completions_are_refused(run_dir, capsys):
    assert cli.main(["generate", "hi", f"--run={run_dir}", "--n=2"]) == 2
    assert "--n=2 must be 1 when sampling is greedy: set --temperature" in capsys.readouterr().err


def test_main_commands_receive_their_arguments(tiny, run_dir, ran):
    assert cli.main(["train", tiny, "--config.seed=5"]) == 0
    assert cli.main(["eval", f"--run={run_dir}"]) == 0
    assert cli.main(["generate", "hi", f"--run={run_dir}"]) == 0

    (train, config, train_args), (evaluate, eval_args), (generate, generate_args) = ran
    assert train == "jaxrl.cli.train"
    assert (evaluate, generate) == ("jaxrl.cli.evaluate", "jaxrl.cli.generate")
    assert config.seed == 5
    assert train_args.config is config
    assert eval_args.options.run == run_dir
    assert generate_args.options.prompt == "hi"


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("a=1 must be 2"), 2, "jaxrl: error: a=1 must be 2\n"),
        (RequestError("too\n  long"), 2, "jaxrl: error: too long\n"),
        (DataError("no task"), 2, "jaxrl: error: no task\n"),
        (CheckpointError("version 3"), 1, "jaxrl: error: version 3\n"),
        (CheckpointError(), 1, "jaxrl: error: CheckpointError\n"),
        (KeyboardInterrupt(), 130, "jaxrl: error: interrupted\n"),
    ],
)
def test_main_error_of_a_command_is_one_line_and_a_code(error, code, line, tiny, failing, capsys):
    failing(error)

    assert cli.main(["train", tiny]) == code
    assert capsys.readouterr().err == line


def test_main_cause_of_an_error_stands_in_the_line(tiny, failing, capsys):
    error = CheckpointError("version 3 is gone")
    error.__cause__ = KeyError("x")
    failing(error)

    cli.main(["train", tiny])

    assert capsys.readouterr().err == ("jaxrl: error: version 3 is gone (cause: KeyError: 'x')\n")


def test_main_error_that_is_not_ours_keeps_its_traceback(tiny, failing):
    failing(ZeroDivisionError())

    with pytest.raises(ZeroDivisionError):
        cli.main(["train", tiny])


def deprecate(monkeypatch, **names: Deprecated) -> None:
    """Let the real train section have deprecated names for the time of a test."""
    info = dataclasses.replace(TrainConfig.__section__, deprecated=names)
    monkeypatch.setattr(TrainConfig, "__section__", info)


def test_main_deprecated_flag_warns_in_one_line_and_carries_the_value(
    tiny, ran, monkeypatch, capsys
):
    deprecate(
        monkeypatch,
        lr=Deprecated(since="0.2", to="learning_rate", migration="set train.learning_rate"),
    )

    assert cli.main(["train", tiny, "--config.train.lr=0.5"]) == 0

    assert ran[0][1].train.learning_rate == 0.5
    assert capsys.readouterr().err == (
        "jaxrl: warning: train.lr is deprecated since 0.2 and will be removed: "
        "set train.learning_rate\n"
    )


def test_main_removed_flag_is_refused_with_the_migration(tiny, ran, monkeypatch, capsys):
    deprecate(
        monkeypatch, lr=Deprecated(since="0.2", removed="0.3", migration="set train.learning_rate")
    )

    assert cli.main(["train", tiny, "--config.train.lr=0.5"]) == 2

    assert ran == []
    assert capsys.readouterr().err == (
        "jaxrl: error: train.lr was removed in 0.3: set train.learning_rate\n"
    )


def test_main_deprecated_name_in_config_json_of_a_run_warns_and_carries_the_value(
    run_dir, ran, monkeypatch, capsys, tmp_path
):
    deprecate(
        monkeypatch,
        lr=Deprecated(since="0.2", to="learning_rate", migration="set train.learning_rate"),
    )
    path = tmp_path / "config.json"
    head, _, tail = path.read_text().partition('"train"')
    path.write_text(head + '"train"' + tail.replace('"learning_rate"', '"lr"', 1))

    assert cli.main(["eval", f"--run={run_dir}"]) == 0

    assert ran[0][1].config.train.learning_rate == 1e-4
    assert "jaxrl: warning: train.lr is deprecated since 0.2" in capsys.readouterr().err


def test_main_help_lists_commands_and_version(capsys):
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text for name in ("train", "eval", "generate"))

    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"jaxrl {jaxrl.__version__}\n"

    assert cli.main([]) == 2


def test_main_train_help_lists_every_field(capsys):
    assert cli.main(["train", "--help"]) == 0

    text = capsys.readouterr().out
    for path, field in leaf_fields(cli.reference.ExperimentConfig):
        entry = text.split(f"  --config.{path}\n")[1].split("\n  --")[0]
        flat = " ".join(entry.split())
        assert field.doc in flat
        assert f"[{field.tier}; " in flat
        assert field.constraint in flat


@pytest.mark.parametrize("command", ["eval", "generate"])
def test_main_command_help_lists_its_flags(command, capsys):
    assert cli.main([command, "--help"]) == 0

    text = capsys.readouterr().out
    flags = [flag for flag, _ in parsing.option_flags(parsing.COMMANDS[command])]
    assert all(f"  --{flag}\n" in text for flag in flags)


REFUSE = """
import sys
from jaxrl.cli.main import main
code = main(sys.argv[1:])
loaded = [name for name in ("jax", "jaxlib", "flax", "numpy") if name in sys.modules]
sys.exit(f"code {code}, loaded {loaded}" if loaded else code)
"""


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--config.train.learning_rat=1"], "train.learning_rat does not exist; did you mean"),
        (["--config.train.learning_rate=-1"], "train.learning_rate=-1.0 must be above 0"),
    ],
)
def test_process_mistake_is_refused_before_jax_is_imported(tiny, argv, message):
    command = [sys.executable, "-c", REFUSE, "train", tiny, *argv]

    result = subprocess.run(command, capture_output=True, text=True)

    assert result.returncode == 2, result.stderr
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_process_module_is_the_command():
    command = [sys.executable, "-m", "jaxrl", "--version"]

    result = subprocess.run(command, capture_output=True, text=True)

    assert (result.returncode, result.stdout) == (0, f"jaxrl {jaxrl.__version__}\n")


def test_process_help_into_a_closed_pipe_is_silent():
    command = f"{sys.executable} -m jaxrl train --help | head -n 1"

    result = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True)

    assert (result.returncode, result.stderr) == (0, b"")


def test_reference_page_is_current(repo_root):
    tool = repo_root / "tools" / "config_reference.py"

    result = subprocess.run([sys.executable, tool, "--check"], capture_output=True, text=True)

    assert result.returncode == 0, result.stdout + result.stderr
    page = (repo_root / "docs" / "cli-reference.md").read_text()
    assert all(
        f"| `--config.{path}` |" in page for path, _ in leaf_fields(cli.reference.ExperimentConfig)
    )
