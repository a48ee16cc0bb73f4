"""Claims of files: one writer, waiting ones that go on, and nothing that a fork or a reader holds for good."""

import fcntl
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from toolkit.file_claims import claimed, locked, publish


def write(path, content):
    with claimed(path) as stream:
        if not path.exists():
            stream.write(content)
            publish(stream, path)
            return True
    return False


def test_one_of_many_writes_and_nothing_else_is_left(tmp_path):
    path = tmp_path / "file"

    def slowly(number):
        with claimed(path) as stream:
            if path.exists():
                return None
            time.sleep(0.1)
            stream.write(bytes([number]) * 100)
            publish(stream, path)
            return number

    with ThreadPoolExecutor(8) as pool:
        wrote = [number for number in pool.map(slowly, range(8)) if number is not None]
    assert path.read_bytes() == bytes(wrote) * 100
    assert os.listdir(tmp_path) == ["file"]


def test_who_fails_leaves_nothing_and_the_next_one_writes(tmp_path):
    path = tmp_path / "file"
    with pytest.raises(TypeError), claimed(path) as stream:
        stream.writelines([b"half" * 10_000, "no bytes"])
    assert os.listdir(tmp_path) == []
    path.with_name("file.tmp").write_bytes(b"of a killed process")
    assert write(path, b"whole")
    assert path.read_bytes() == b"whole"


def test_whoever_waited_goes_on_though_the_file_is_read(tmp_path):
    path = tmp_path / "file"
    with claimed(path) as stream:
        waiting = threading.Thread(target=write, args=(path, b"other"), daemon=True)
        waiting.start()
        time.sleep(0.1)  # it waits now
        publish(stream, path)
    with ExitStack() as held:
        # who waits may lock the renamed file for an instant, before it sees that it was renamed
        while held.enter_context(locked(path, fcntl.LOCK_SH)) is None:
            time.sleep(0.001)
        waiting.join(120)
        assert not waiting.is_alive()


def test_a_fork_keeps_no_lock_of_another_thread(tmp_path):
    path, begun, end = tmp_path / "file", threading.Event(), threading.Event()

    def hold():
        with claimed(path) as stream:
            begun.set()
            end.wait()
            publish(stream, path)

    holding = threading.Thread(target=hold)
    holding.start()
    begun.wait()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, b"x")
        time.sleep(600)
        os._exit(0)
    try:
        os.read(reading, 1)
        end.set()
        holding.join()
        with locked(path, fcntl.LOCK_EX) as stream:
            assert stream is not None
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_a_read_file_is_locked_for_as_long_as_it_is_mapped(tmp_path):
    import numpy as np

    path = tmp_path / "file"
    write(path, bytes(100))
    with locked(path, fcntl.LOCK_SH) as stream:
        mapped = np.memmap(stream, np.uint8, mode="r")[10:]
    with locked(path, fcntl.LOCK_EX) as stream:
        assert stream is None
    del mapped
    with locked(path, fcntl.LOCK_EX) as stream:
        assert stream is not None


def test_what_is_published_is_not_emptied_by_one_who_opened_it_before(tmp_path):
    path, wrong = tmp_path / "file", []

    def go(_):
        for _ in range(100):
            write(path, b"whole" * 1000)
            try:
                with locked(path, fcntl.LOCK_SH) as stream:
                    if stream and stream.read() != b"whole" * 1000:
                        wrong.append(1)
                with locked(path, fcntl.LOCK_EX) as stream:
                    if stream:
                        path.unlink()
            except FileNotFoundError:
                pass

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(go, range(8)))
    assert not wrong
