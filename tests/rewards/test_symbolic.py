"""Mathematical equality, and what it costs when a model writes something monstrous."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time

import pytest
from rewards.pool_helpers import is_gone, linux, said, score

from jaxrl.errors import ConfigError, RewardError
from jaxrl.rewards.pool import RewardPool
from jaxrl.rewards.scorers import load_scorer
from jaxrl.rewards.symbolic import last_boxed, symbolic

needs_math = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="needs the extra `math`"
)
MONSTERS = [r"\boxed{9^{9^{9^{9}}}}", "9**9**9**9"]


@needs_math
@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("18", "The answer is \\boxed{18}."),
        ("18", "so she makes $18.00"),
        ("18", "#### 18"),
        ("18", "It is **18** dollars."),
        ("1,200", "1200"),
        (r"\frac{1}{2}", "0.5"),
        ("0.5", r"\boxed{\frac{1}{2}}"),
        (r"\frac{3}{4}", r"\boxed{\dfrac{3}{4}}"),
        ("1/2", r"\boxed{\frac12}"),
        (r"1\frac{1}{2}", r"\boxed{1.5}"),
        (r"2\sqrt{3}", r"$\sqrt{12}$"),
        ("x+1", "1+x"),
        ("x^2 - 1", r"\boxed{(x-1)(x+1)}"),
        ("p - q", r"\boxed{-q+p}"),
        (r"\{1, 2, 3\}", r"\boxed{\{3, 2, 1\}}"),
        ("1,2", r"\boxed{2, 1}"),
        ("[1, 2)", r"\boxed{[1, 2)}"),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\boxed{\begin{pmatrix} 1 \\ 2 \end{pmatrix}}"),
        ("3 + 4i", r"\boxed{4i + 3}"),
        ("5", r"\boxed{5\text{ cm}}"),
        ("90^\\circ", r"\boxed{90}"),
        (r"\text{even}", r"\boxed{\text{even}}"),
        # Numbers with an exponent, in a text and as a formula.
        ("100000", "1e5"),
        ("300000000", "the answer is 3e8."),
        ("0.00025", r"\boxed{2.5E-4}"),
        ("1e5", r"\boxed{100000}"),
        # The last box counts.
        ("2", r"first \boxed{1}, no, \boxed{2}"),
        # A percent sign on one side stands for either reading.
        (r"50\%", r"\boxed{50}"),
        (r"50\%", r"\boxed{0.5}"),
        ("50", r"\boxed{50\%}"),
        ("0.5", r"\boxed{50\%}"),
    ],
)
def test_symbolic_equal_answers_score_one(answer, text):
    assert symbolic(said(text), {"answer": answer}) == 1.0


@needs_math
@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("18", r"\boxed{17}"),
        ("18", "no idea"),
        ("18", ""),
        ("7", r"\boxed{7"),
        ("0.5", "50"),
        ("x+1", r"\boxed{x+2}"),
        ("1", "1e5"),
        ("1", "1e999999999"),
        ("3", "the answer is 3e8"),
        ("1", r"\boxed{1} or rather \boxed{2}"),
        (r"\frac{1}{3}", r"\boxed{0.33}"),
        ("[1, 2)", r"\boxed{(1, 2)}"),
        ("(1, 2)", r"\boxed{(2, 1)}"),
        (r"\text{even}", r"\boxed{\text{odd}}"),
        ("5", "\\boxed{__import__('os').abort()}"),
        ("5", "exit()"),
    ],
)
def test_symbolic_other_answers_score_nothing(answer, text):
    assert symbolic(said(text), {"answer": answer}) == 0.0


@needs_math
@pytest.mark.parametrize("answer", ["", "{", r"\frac{", "\\left("])
def test_symbolic_reference_that_cannot_be_read_raises_and_names_it(answer):
    with pytest.raises(ValueError, match="the reference answer .* cannot be read as mathematics"):
        symbolic(said(r"\boxed{1}"), {"answer": answer})


@needs_math
@pytest.mark.parametrize(
    "text",
    [
        "a " * 50_000,
        "$" * 100_000,
        "\\boxed{" * 15_000,
        "(" * 100_000,
        "\\frac{" * 16_000,
        "1" * 100_000,
        "$x$ " * 25_000,
        "\\boxed{" + "{" * 50_000 + "}" * 50_001,
        "answer " * 14_000,
    ],
    ids=lambda text: text[:8],
)
def test_symbolic_long_text_is_scored_in_bounded_time(text):
    began = time.monotonic()

    assert symbolic(said(text), {"answer": "5"}) == 0.0
    assert time.monotonic() - began < 60  # each takes less than a second


@needs_math
def test_symbolic_answer_at_either_end_of_a_long_text_is_found():
    filler = "so we go on " * 10_000

    assert symbolic(said(filler + " the answer is 5"), {"answer": "5"}) == 1.0
    assert symbolic(said(r"\boxed{5} " + filler), {"answer": "5"}) == 1.0


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"\boxed{1}", "1"),
        (r"\boxed{\frac{1}{2}} then", r"\frac{1}{2}"),
        (r"\boxed{\{1\}}", r"\{1\}"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{1} and \boxed{2", "1"),
        ("none", None),
        (r"\boxed{", None),
        (r"\boxed{}", ""),
    ],
)
def test_last_boxed_finds_what_the_last_closed_box_holds(text, inside):
    assert last_boxed(text) == inside


@needs_math
def test_pool_monsters_are_timeouts_and_the_others_are_scored():
    with RewardPool("symbolic", workers=2, timeout_s=2.0) as pool:
        before = set(pool.pids)

        results = score(pool, r"\boxed{5}", *MONSTERS, "4", reference={"answer": "5"})
        after = score(pool, r"\boxed{10/2}", reference={"answer": "5"})

    assert [r.value for r in (results[0], results[-1], *after)] == [1.0, 0.0, 1.0]
    assert {r.outcome for r in results[1:-1]} == {"timeout"}
    assert all(map(is_gone, before))


@needs_math
def test_pool_reference_that_cannot_be_read_is_an_error_that_names_it():
    with RewardPool("symbolic") as pool:
        (result,) = score(pool, r"\boxed{5}", reference={"answer": r"\frac{"})

    assert (result.outcome, result.value) == ("error", None)
    assert r"the reference answer '\\frac{' cannot be read as mathematics" in result.detail


@needs_math
def test_load_symbolic_does_not_import_the_package_here():
    code = (
        "import sys\n"
        "from jaxrl.rewards.scorers import load_scorer\n"
        "load_scorer('symbolic')\n"
        "assert not {'math_verify', 'sympy'} & set(sys.modules)\n"
    )

    subprocess.run([sys.executable, "-c", code], check=True)


def test_load_symbolic_without_the_package_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(ConfigError, match=r"pip install 'jaxrl\[math\]'"):
        load_scorer("symbolic")


@linux
def test_pool_process_prepares_once_and_grows_no_further_than_it_may():
    class Hungry:
        memory_bytes = 64 << 20
        prepared = 0

        def prepare(self):
            self.prepared += 1

        def __call__(self, completion, reference):
            bytearray(int(completion.text))
            return float(self.prepared)

    with RewardPool(Hungry()) as pool:
        small, big, again = score(pool, str(1 << 20), str(1 << 30), str(1 << 20))

    assert (small.value, again.value) == (1.0, 1.0)
    assert big.outcome == "error"
    assert "MemoryError" in big.detail


def test_start_scorer_that_cannot_prepare_raises_with_the_cause():
    class Unready:
        def prepare(self):
            raise OSError("no such model")

        def __call__(self, completion, reference):
            return 0.0

    with pytest.raises(RewardError, match="cannot load the scorer: OSError: no such model"):
        RewardPool(Unready()).start()
