"""Processes that cannot work together are told so, all of them, when they meet."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxrl.distributed import rendezvous
from jaxrl.distributed.rendezvous import Hello, decode_hello, judge, meet
from jaxrl.distributed.sides import differences, flatten, name_processes, sides_of
from jaxrl.errors import DistributedError


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    monkeypatch.setattr(rendezvous, "_GRACE_S", 0.5)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def hello(process_id: int, num_processes: int = 3, **facts: str) -> Hello:
    return Hello(process_id, num_processes, {"jax": "1", **facts}, f"host{process_id}")


def meet_all(*hellos: Hello, timeout_s: float = 20.0, host: str = "127.0.0.1", port: int = 0):
    """What each got: a job id, or the message of its error."""
    port = port or free_port()

    def one(each: Hello) -> str:
        try:
            return meet(each, host, port, timeout_s)
        except DistributedError as error:
            return f"error: {error}"

    with ThreadPoolExecutor(len(hellos)) as pool:
        return list(pool.map(one, hellos))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_meet_processes_that_agree_get_the_same_job(host):
    if host == "::1":
        try:
            socket.create_server((host, 0), family=socket.AF_INET6).close()
        except OSError as error:
            pytest.skip(f"this machine has no IPv6 loopback: {error}")

    first, second = (meet_all(hello(2), hello(1), hello(0), host=host) for _ in range(2))

    assert len(set(first)) == 1
    assert not first[0].startswith("error")
    assert first[0] != second[0]


def test_meet_other_facts_is_error_on_all_naming_both_sides():
    got = meet_all(hello(0, code="aa"), hello(1, code="bb"), hello(2, code="aa"))

    assert set(got) == {"error: the job cannot start: code: aa in processes 0, 2; bb in process 1"}


def test_meet_other_count_is_error_on_all_long_before_the_timeout():
    got = meet_all(hello(0, 2), hello(1, 3), timeout_s=600)

    assert len(set(got)) == 1
    assert "num_processes differs: 2 in process 0; 3 in process 1" in got[0]


def test_meet_duplicate_id_is_error_on_all():
    got = meet_all(hello(0), hello(1), hello(1), timeout_s=600)

    assert len(set(got)) == 1
    assert "process_id=1 is taken 2 times: host1, host1" in got[0]
    assert "process 2 of 3 did not arrive" in got[0]


def test_meet_duplicate_of_coordinator_is_error_on_all():
    got = meet_all(hello(0), hello(0), hello(1), timeout_s=600)

    assert len(set(got)) == 1
    assert "process_id=0 is taken 2 times" in got[0]


def test_meet_id_out_of_range_is_error_on_all():
    got = meet_all(hello(0, 2), hello(7, 2), timeout_s=600)

    assert len(set(got)) == 1
    assert "process_id=7 (host7) must be between 0 and 1" in got[0]


def test_meet_missing_process_is_named_on_all_that_arrived():
    got = meet_all(hello(0), hello(1), timeout_s=1.0)

    assert all("process 2 of 3 did not arrive" in each for each in got)


def test_meet_whose_coordinator_went_away_says_that_it_is_the_coordinator():
    with socket.create_server(("127.0.0.1", 0)) as coordinator, ThreadPoolExecutor(1) as pool:
        port = coordinator.getsockname()[1]
        waiting = pool.submit(meet_all, hello(1), timeout_s=1.5, port=port)
        arrived, _ = coordinator.accept()
        arrived.sendall(b'{"missing": [2]}\n')
        arrived.close()
        coordinator.close()
        (got,) = waiting.result()

    assert f"process 1 cannot reach the coordinator, process 0, at 127.0.0.1:{port}" in got


def test_meet_without_coordinator_says_where_it_looked():
    port = free_port()

    (got,) = meet_all(hello(1), timeout_s=0.5, port=port)

    assert f"process 1 cannot reach the coordinator, process 0, at 127.0.0.1:{port}" in got
    assert "Connection refused" in got


def test_meet_port_of_another_program_is_named():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        threading.Thread(target=_hang_up, args=(other,), daemon=True).start()

        (got,) = meet_all(hello(0), timeout_s=0.5, port=port)

    assert (
        got == f"error: process 0 cannot listen on 127.0.0.1:{port}: another program uses the port"
    )


def test_meet_where_another_program_answers_says_that_it_is_no_coordinator():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        line = b'{"missing": ["x", 2]}\n'
        threading.Thread(target=_hang_up, args=(other, line), daemon=True).start()

        (got,) = meet_all(hello(1), timeout_s=0.5, port=port)

    assert "process 1 cannot reach the coordinator, process 0, at 127.0.0.1:" in got
    assert "what listens there is not waiting for this process" in got


def _hang_up(server: socket.socket, line: bytes = b"") -> None:
    while True:
        with contextlib.suppress(ConnectionError):
            try:
                caller, _ = server.accept()
            except OSError:
                return
            with caller:
                caller.recv(65536)
                caller.sendall(line)


STRANGERS = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "nothing": b"",
    "binary": bytes(range(256)) * 4,
    "deep": b"[" * 100_000 + b"\n",
    "other json": b'{"meeting": "other"}\n',
    "no fields": b'{"meeting": "jaxrl-meeting-1"}\n',
    "wrong types": json.dumps(
        {
            "meeting": "jaxrl-meeting-1",
            "process_id": "1",
            "num_processes": 3,
            "facts": {},
            "where": "",
        }
    ).encode()
    + b"\n",
    "endless": b"x" * (2 << 20),
}


def test_meet_strangers_do_not_disturb():
    port = free_port()
    held = []

    def knock(data: bytes) -> None:
        while True:
            try:
                stranger = socket.create_connection(("127.0.0.1", port), timeout=5)
                break
            except ConnectionRefusedError:
                continue
        with contextlib.suppress(OSError):
            stranger.sendall(data)
        held.append(stranger)

    with ThreadPoolExecutor(2) as pool:
        meeting = pool.submit(meet_all, hello(0, 2), timeout_s=60, port=port)
        for data in STRANGERS.values():
            knock(data)
        (late,) = meet_all(hello(1, 2), timeout_s=60, port=port)
        (first,) = meeting.result()

    for stranger in held:
        stranger.close()
    assert late == first
    assert not late.startswith("error")


@pytest.mark.parametrize("name", [name for name in STRANGERS if name != "endless"])
def test_decode_hello_of_strangers_is_none(name):
    assert decode_hello(STRANGERS[name].strip()) is None


def test_decode_hello_is_what_was_encoded():
    assert decode_hello(hello(1, code="x").encode().strip()) == hello(1, code="x")


def test_judge_names_everything_that_is_wrong():
    problem = judge(2, [hello(0, 2, a="1"), hello(5, 3, a="2")])

    assert problem == (
        "num_processes differs: 2 in process 0; 3 in process 5; "
        "process_id=5 (host5) must be between 0 and 1; process 1 of 2 did not arrive; "
        "a: 1 in process 0; 2 in process 5"
    )
    assert judge(2, [hello(0, 2), hello(1, 2)]) == ""


def test_sides_are_ordered_by_size_and_runs_are_short():
    assert name_processes([3]) == "process 3"
    assert name_processes([4, 0, 2, 3]) == "processes 0, 2-4"
    assert sides_of({0: "a", 1: "b", 2: "b"}) == "b in processes 1, 2; a in process 0"
    assert len(sides_of({0: "x" * 10_000})) < 300


def test_differences_are_named_up_to_a_bound():
    facts = {0: {f"f{i}": "1" for i in range(9)}, 1: {"f0": "2"}}

    found = differences(facts, most=2)

    assert found == [
        "f0: 1 in process 0; 2 in process 1",
        "f1: 1 in process 0; nothing in process 1",
        "and 7 more",
    ]
    assert differences({0: {"a": "1"}, 1: {"a": "1"}}) == []


def test_flatten_gives_dotted_names():
    assert flatten({"train": {"lr": 0.1}, "seed": 3}) == {"train.lr": "0.1", "seed": "3"}
