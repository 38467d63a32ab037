"""Processes compare what they run, and what they send, before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from distributed import hlo_texts
from distributed.stores import controls
from hypothesis import strategies as st

from jaxrl.distributed.collectives import Collectives
from jaxrl.distributed.groups import Group, device_groups, process_group
from jaxrl.distributed.order import agree, compare, fingerprint
from jaxrl.distributed.record import record_program
from jaxrl.distributed.sequence import Sequence, decode_tail, first_difference
from jaxrl.errors import CollectiveOrderError, DistributedError, HangError
from jaxrl.sharding import make_mesh


def together(count: int, run: Callable[[Any, int], Any]) -> list[Any]:
    """run(control, index) on threads that stand for processes: results, or the errors."""
    ends = controls(count)

    def one(index: int) -> Any:
        try:
            return run(ends[index], index)
        except Exception as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


PAIRS = hlo_texts.all_reduce("{{0,1},{2,3}}")


def arrays(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.float32)


def test_agree_equal_programs_pass_on_all():
    results = together(
        3, lambda c, i: agree(c, fingerprint("step", PAIRS, arrays(4)), number=0, timeout_s=20)
    )

    assert results == [None] * 3


def test_agree_other_groups_is_same_error_on_all_naming_both_sides():
    def run(control, index):
        text = PAIRS if index < 2 else hlo_texts.all_reduce("[2,2]<=[2,2]T(1,0)")
        agree(control, fingerprint("step", text, arrays(4)), number=0, timeout_s=20)

    first, second, third = together(3, run)

    assert isinstance(first, CollectiveOrderError)
    assert (
        str(first)
        == str(second)
        == str(third)
        == (
            "program 'step': collective 0 differs: "
            "all-reduce sum f32[8,128] over [[0,1],[2,3]] in processes 0, 1; "
            "all-reduce sum f32[8,128] over [[0,2],[1,3]] in process 2"
        )
    )


def test_agree_absent_process_is_named():
    def run(control, index):
        control.describe = lambda process: f"process {process} naps"
        if index != 1:
            agree(control, fingerprint("step", PAIRS), number=0, timeout_s=0.2)

    first, _, third = together(3, run)

    assert isinstance(first, HangError)
    assert "process 0 waited 0.2 s for the others to be ready for 'step'" in str(first)
    assert "process 1 of 3 did not arrive; process 1 naps" in str(third)


def test_agree_process_that_left_is_named_without_waiting():
    def run(control, index):
        if index == 1:
            return control.leave("ValueError: broken")
        agree(control, fingerprint("step", PAIRS), number=0, timeout_s=600)

    first, _ = together(2, run)

    assert isinstance(first, DistributedError)
    assert "process 1 left the job: ValueError: broken" in str(first)


def test_agree_forgets_what_nobody_reads_any_more():
    ends = controls(1)

    for number in range(50):
        agree(ends[0], fingerprint("step", PAIRS), number=number, timeout_s=1)

    assert len(ends[0].folder("agree/47")) == 0
    assert len(ends[0].folder("agree/49")) == 1


def test_compare_names_cause_before_consequence():
    def print_of(name="step", text=PAIRS, shape=(4,), **facts):
        return fingerprint(name, text, arrays(*shape), facts)

    assert compare({0: print_of(), 1: print_of()}) == ""
    assert compare({0: print_of("a"), 1: print_of("b")}) == (
        "processes are about to run different programs: a in process 0; b in process 1"
    )
    assert "config.lr: 0.1 in process 0; 0.2 in process 1" in compare(
        {0: print_of(config={"lr": 0.1}), 1: print_of(config={"lr": 0.2})}
    )
    assert "input 0 differs:  float32[4] in process 0;  float32[5] in process 1" in compare(
        {0: print_of(), 1: print_of(shape=(5,))}
    )
    none = hlo_texts.module("ROOT %r = f32[8,128]{1,0} copy(%param)")
    assert (
        "collective 0 differs (of 1 in process 0; 0 in process 1): all-reduce sum f32[8,128] over "
        "[[0,1],[2,3]] in process 0; none in process 1"
    ) in compare({0: print_of(), 1: print_of(text=none)})


def test_fingerprint_of_unknown_hlo_holds_its_lines(tmp_path):
    text = hlo_texts.all_reduce("<0,1>")

    mine = fingerprint("step", text)
    record_program(tmp_path, "step", text)

    (line,) = [line for line in mine.collectives if "replica_groups=<0,1>" in line]
    assert "metadata" not in line
    assert list(tmp_path.iterdir()) == []


def _sequence(entries) -> Sequence:
    sequence = Sequence()
    for entry in entries:
        sequence.append(entry)
    return sequence


def test_first_difference_names_launch_and_what_came_before():
    tails = {p: _sequence(e).tail() for p, e in enumerate((["a", "b", "c"], ["a", "c"]))}

    assert first_difference(tails) == (
        "launch 2 differs: b in process 0; c in process 1 (after a on all)"
    )


def test_first_difference_of_one_that_lags_behind_is_none():
    tails = {0: _sequence("aaaa").tail(), 1: _sequence("aa").tail(), 2: {}}

    assert first_difference(tails) is None


def test_first_difference_before_what_is_remembered_says_so():
    same = ["x"] * 100
    tails = {p: decode_tail(_sequence([first, *same]).encode()) for p, first in enumerate("ab")}

    assert first_difference(tails) == (
        "launches differ at number 94 or before between process 0 and process 1: "
        "x in processes 0, 1"
    )
    everything = {p: _sequence([first, *same]).tail() for p, first in enumerate("ab")}
    assert first_difference(everything) == "launch 1 differs: a in process 0; b in process 1"


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    st.lists(st.sampled_from("ab"), max_size=12), st.lists(st.sampled_from("ab"), max_size=12)
)
def test_first_difference_is_that_of_the_lists(first, second):
    found = first_difference({0: _sequence(first).tail(), 1: _sequence(second).tail()})

    pairs = enumerate(zip(first, second, strict=False), start=1)
    expected = next((number for number, (a, b) in pairs if a != b), None)
    assert (found is None) == (expected is None)
    if expected:
        assert found.startswith(f"launch {expected} differs")


def group(process: int, count: int = 3) -> Group:
    return Group(("data",), tuple(range(count)), (), process)


@pytest.mark.parametrize(
    ("reduction", "expected"), [("sum", [6, 3]), ("mean", [2, 1]), ("max", [3, 1]), ("min", [1, 1])]
)
def test_all_reduce_is_the_named_reduction_on_all(reduction, expected):
    def run(control, index):
        value = np.asarray([index + 1.0, 1.0], np.float32)
        return Collectives(control, group(index), 20).all_reduce(value, reduction)

    for result in together(3, run):
        assert result.dtype == np.float32
        np.testing.assert_array_equal(result, expected)


def test_broadcast_and_gather_are_by_source_and_rank():
    def run(control, index):
        calls = Collectives(control, group(index), 20)
        calls.barrier("start")
        return (
            calls.broadcast(np.full((2, 2), index), source=1),
            calls.all_gather(np.bool_(index == 2)),
            calls.all_gather(np.zeros((0, 3))),
        )

    for sent, gathered, empty in together(3, run):
        np.testing.assert_array_equal(sent, np.ones((2, 2)))
        np.testing.assert_array_equal(gathered, [False, False, True])
        assert empty.shape == (3, 0, 3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "bool", "complex64"])
def test_all_gather_of_any_numeric_dtype_gives_its_values(dtype):
    def run(control, index):
        value = jnp.asarray([index, 1], dtype)
        return Collectives(control, group(index), 20).all_gather(value)

    for gathered in together(3, run):
        assert gathered.dtype == jnp.dtype(dtype)
        expected = np.asarray([[0, 1], [1, 1], [2, 1]]).astype(dtype)
        np.testing.assert_array_equal(gathered, expected)


def test_all_gather_of_the_other_byte_order_gives_the_values():
    def run(control, index):
        order = "><>"[index]
        value = np.asarray([index + 1, 2], f"{order}i4")
        return Collectives(control, group(index), 20).all_gather(value)

    for gathered in together(3, run):
        np.testing.assert_array_equal(gathered, [[1, 2], [2, 2], [3, 2]])


def test_broadcast_source_of_numpy_is_the_number():
    def run(control, index):
        return Collectives(control, group(index), 20).broadcast(index, source=np.argmax([0, 5, 1]))

    np.testing.assert_array_equal(together(3, run), [1, 1, 1])


DIFFERENT_CALLS = {
    "shape": lambda calls: calls.all_reduce(np.zeros(4, np.float32), "sum"),
    "dtype": lambda calls: calls.all_reduce(np.zeros(3), "sum"),
    "reduction": lambda calls: calls.all_reduce(np.zeros(3, np.float32), "max"),
    "kind": lambda calls: calls.all_gather(np.zeros(3, np.float32)),
}


@pytest.mark.parametrize("difference", DIFFERENT_CALLS)
def test_collectives_that_differ_are_error_on_all(difference):
    def run(control, index):
        calls = Collectives(control, group(index), 20)
        calls.all_reduce(1.0, "sum")
        if index == 2:
            return DIFFERENT_CALLS[difference](calls)
        return calls.all_reduce(np.zeros(3, np.float32), "sum")

    results = together(3, run)

    assert all(isinstance(result, CollectiveOrderError) for result in results), results
    assert "call 1 of data of processes 0-2 differs" in str(results[0])
    assert "all-reduce sum float32[3] in processes 0, 1" in str(results[0])
    assert len({str(result) for result in results}) == 1


def test_broadcast_from_different_sources_is_error_on_all():
    def run(control, index):
        return Collectives(control, group(index), 20).broadcast(1, source=int(index == 2))

    results = together(3, run)

    assert all(isinstance(result, CollectiveOrderError) for result in results)
    assert "source 0" in str(results[0])
    assert "source 1" in str(results[0])


def test_collectives_of_subgroups_do_not_meet():
    def run(control, index):
        mine = Group(("data",), (index // 2 * 2, index // 2 * 2 + 1), (), index)
        return float(Collectives(control, mine, 20).all_reduce(float(index), "sum"))

    assert together(4, run) == [1.0, 1.0, 5.0, 5.0]


def test_collectives_bad_arguments_name_the_rule():
    (control,) = controls(1)
    calls = Collectives(control, group(0), 1)

    with pytest.raises(ValueError, match="reduction='median' must be one of"):
        calls.all_reduce(1, "median")
    with pytest.raises(ValueError, match=r"source=5 must be one of \(0, 1, 2\)"):
        calls.broadcast(1, source=5)
    for value in (None, "text", np.datetime64("2026-01-01"), np.zeros(2, "i4,f4")):
        with pytest.raises(ValueError, match="must be numeric"):
            calls.all_gather(value)
    with pytest.raises(HangError, match="barrier late"):
        calls.barrier("late", timeout_s=0.1)


class _Device:
    """A device of some process, for meshes of jobs that are larger than this machine."""

    def __init__(self, index: int, process_index: int):
        self.id, self.process_index = index, process_index

    def __repr__(self) -> str:
        return f"d{self.id}"


class _Mesh:
    """What groups need of a mesh: names of axes and an array of devices."""

    def __init__(self, shape: dict[str, int], per_process: int):
        count = int(np.prod(list(shape.values())))
        devices = [_Device(i, i // per_process) for i in range(count)]
        self.devices = np.asarray(devices, object).reshape(list(shape.values()))
        self.axis_names, self.shape = tuple(shape), shape


def test_process_group_along_axes_has_ranks_of_processes():
    mesh = _Mesh({"data": 2, "fsdp": 2, "tensor": 2}, per_process=2)

    data, fsdp = process_group(mesh, "data", 3), process_group(mesh, "fsdp", 3)
    both, tensor = process_group(mesh, ("data", "fsdp"), 3), process_group(mesh, "tensor", 3)

    assert (data.processes, data.rank, data.size) == ((1, 3), 1, 2)
    assert (fsdp.processes, fsdp.rank) == ((2, 3), 1)
    assert both.processes == (0, 1, 2, 3)
    assert (tensor.processes, tensor.size) == ((3,), 1)
    assert both.name == "data,fsdp of processes 0-3"


def test_process_group_whose_devices_lie_apart_is_error():
    mesh = _Mesh({"data": 4, "tensor": 2}, per_process=1)
    mesh.devices[0, 1].process_index = 2  # process 2 has a device in two rows

    with pytest.raises(DistributedError, match="devices of process 2 lie in groups of"):
        process_group(mesh, "tensor", 2)
    with pytest.raises(DistributedError, match="process 99 has no device in the mesh"):
        process_group(mesh, "tensor", 99)


def test_device_groups_differ_only_along_the_axes():
    mesh = make_mesh(fsdp=4, tensor=2)

    groups = device_groups(mesh, "fsdp")

    assert [[d.id for d in row] for row in groups] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    with pytest.raises(ValueError, match="must be distinct axes of the mesh"):
        device_groups(mesh, "model")
