"""Tests of the installed package. Those of bfloat16 and torch need ml_dtypes and torch."""

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path

import numpy
import pytest

import tessera

FIXTURES = Path(__file__).parents[2] / "tests" / "io"
WEIGHTS = {
    "matrix": numpy.arange(48, dtype=numpy.float32).reshape(6, 8),
    "cube": numpy.arange(60, dtype=numpy.int64).reshape(3, 4, 5),
    "scalar": numpy.array(7.5),
    "empty": numpy.empty((0, 3), numpy.float32),
    "flags": numpy.array([True, False, True]),
}


def golden(path):
    """Tensors of a safetensors file, as (dtype, shape, bytes)."""
    data = Path(path).read_bytes()
    size = int.from_bytes(data[:8], "little")
    return {
        name: (entry["dtype"], tuple(entry["shape"]), data[8 + size:][slice(*entry["data_offsets"])])
        for name, entry in json.loads(data[8:8 + size]).items() if name != "__metadata__"
    }


@pytest.fixture
def run(tmp_path):
    tessera.save_checkpoint(tmp_path / "run", WEIGHTS, step=3, optimizer={"exp_avg": {"matrix": WEIGHTS["matrix"]}})
    return tmp_path / "run"


def test_saved_tensors_are_read(run):
    checkpoint = tessera.open(run)
    assert checkpoint.kind == "tessera checkpoint"
    assert checkpoint.path == str(run / "step-00000003")
    assert sorted(checkpoint) == sorted([*WEIGHTS, "optimizer/exp_avg/matrix"])
    for name, value in WEIGHTS.items():
        tensor = checkpoint[name]
        assert (tensor.shape, tensor.dtype, tensor.ndim, tensor.size) == (
            value.shape, value.dtype.name, value.ndim, value.size)
        assert tensor.numpy().dtype == value.dtype
        numpy.testing.assert_array_equal(tensor.numpy(), value)
        numpy.testing.assert_array_equal(numpy.from_dlpack(tensor), value)
    with pytest.raises(KeyError):
        checkpoint["absent"]


@pytest.mark.parametrize("verify", ["chunks", "whole"])
def test_slices_are_those_of_numpy(run, verify):
    checkpoint = tessera.open(run, verify=verify)
    index = numpy.s_
    for key in [index[...], index[1], index[-1], index[1:3], index[..., 2], index[:, 1], index[0, ..., 1],
                index[::2], index[::-1], index[4:0:-2], index[5:1], index[1, 2], index[:, 2:4], index[2:100],
                index[:, ::3]]:
        for name in ("matrix", "cube"):
            numpy.testing.assert_array_equal(checkpoint[name][key], WEIGHTS[name][key], f"{name}[{key}]")
    assert checkpoint["scalar"][()] == 7.5
    assert len(checkpoint["matrix"]) == 6
    assert [row.tolist() for row in checkpoint["matrix"]] == WEIGHTS["matrix"].tolist()
    assert checkpoint["matrix"].astype("float16")[0, 1] == numpy.float16(1)
    assert checkpoint["matrix"].raw[0, 1] == WEIGHTS["matrix"].view(numpy.uint32)[0, 1]
    for key in [6, -7, (0, 0, 0), (..., ...)]:
        with pytest.raises(IndexError):
            checkpoint["matrix"][key]
    for key in [[0, 1], None, True, 1.0]:
        with pytest.raises(TypeError):
            checkpoint["matrix"][key]


def test_long_reads_are_made_in_pieces(run, monkeypatch):
    monkeypatch.setattr("tessera._tensor._PIECE", 70)  # two rows of `matrix`; less than one of `cube`
    checkpoint = tessera.open(run)
    for name, value in WEIGHTS.items():
        numpy.testing.assert_array_equal(checkpoint[name].numpy(), value)
    numpy.testing.assert_array_equal(checkpoint["matrix"][1:6, 2:5], WEIGHTS["matrix"][1:6, 2:5])
    calls = []

    class Counted:
        def read(self, index, begin, end, *rest):
            calls.append((begin, end))

    tensor = checkpoint["matrix"]
    tensor._source = Counted()
    tensor[1:, 1:]
    assert calls == [([1, 1], [3, 8]), ([3, 1], [5, 8]), ([5, 1], [6, 8])]
    # A piece would be less than a chunk, which is verified if it is read completely.
    calls.clear()
    for tensor in (tessera.open(run, verify="whole")["matrix"], tessera.open(run, verify="whole")["matrix"].raw):
        tensor._source = Counted()
        tensor.numpy()
    assert calls == [([0, 0], [6, 8])] * 2


@pytest.mark.parametrize("fixture", ["fsdp-gpt2", "mixed", "torchtitan"])
def test_shards_of_other_programs_are_read(fixture):
    checkpoint = tessera.open(FIXTURES / "dcp" / "fixtures" / fixture)
    found = {name.removeprefix("model."): tensor for name, tensor in checkpoint.items()}
    expected = golden(FIXTURES / "dcp" / "fixtures" / fixture / "expected.safetensors.golden")
    same = 0
    for name, (_, shape, data) in expected.items():
        tensor = found[name.removeprefix("model.")]
        assert tensor.shape == shape
        assert tensor.raw.numpy().tobytes() == data
        same += 1
    assert same > 3


def test_bfloat16(tmp_path):
    bits = numpy.array([[0x3F80, 0x4000], [0xBF80, 0x0000]], numpy.uint16)  # 1, 2, -1, 0
    source = FIXTURES / "dcp" / "fixtures" / "torchtitan"
    tessera.consolidate(source, tmp_path / "out", format="safetensors", dtype="bf16")
    tensor = next(iter(tessera.open(tmp_path / "out").values()))
    assert tensor.dtype == "bfloat16" and tensor.raw[...].dtype == numpy.uint16
    assert tensor.astype("float32").numpy().dtype == numpy.float32
    try:
        import ml_dtypes
    except ImportError:
        with pytest.raises(tessera.Unsupported, match="ml_dtypes") as caught:
            tensor[...]
        assert caught.value.tensor == tensor.name
        return
    assert tensor[...].dtype == ml_dtypes.bfloat16
    tessera.save_checkpoint(tmp_path / "run", {"w": bits.view(ml_dtypes.bfloat16)}, step=1)
    assert tessera.open(tmp_path / "run")["w"].astype("float32").numpy().tolist() == [[1, 2], [-1, 0]]


def test_consolidation(run, tmp_path):
    calls = []
    report = tessera.consolidate(run, tmp_path / "out", format="safetensors", tensors=["matrix", "cube"],
                                 progress=lambda done, total: calls.append((done, total)))
    assert report["tensors"] == 2 and report["step"] == 3 and report["kind"] == "tessera checkpoint"
    assert calls and calls[-1][0] == calls[-1][1]
    assert golden(tmp_path / "out" / "model.safetensors")["matrix"] == (
        "F32", (6, 8), WEIGHTS["matrix"].tobytes())
    with pytest.raises(tessera.InvalidArgument, match="--overwrite"):
        tessera.consolidate(run, tmp_path / "out", format="safetensors")
    tessera.consolidate(run, tmp_path / "out", format="safetensors", overwrite=True)
    with pytest.raises(tessera.InvalidArgument, match='unknown option "speed"'):
        tessera.consolidate(run, tmp_path / "other", speed=9)


def test_parts_of_a_consolidation(run, tmp_path):
    arguments = {"format": "safetensors", "max_shard_size": "200B"}
    first = tessera.consolidate(run, tmp_path / "out", part="2/2", **arguments)
    assert (first["committed"], first["waiting"]) == (False, [1]) and not (tmp_path / "out").exists()
    last = tessera.consolidate(run, tmp_path / "out", part="1/2", **arguments)
    assert last["committed"] and tessera.open(tmp_path / "out")["matrix"][5, 7] == 47
    with pytest.raises(tessera.InvalidArgument, match="K/N"):
        tessera.consolidate(run, tmp_path / "other", part="3/2")


def test_warnings_are_issued(tmp_path):
    source = tmp_path / "shards"
    shutil.copytree(FIXTURES / "dcp" / "fixtures" / "torchtitan", source)
    (source / "config.json").write_text('{"model_type": "own"}')
    with pytest.warns(UserWarning):
        tessera.consolidate(source, tmp_path / "out")


def test_an_exception_in_progress_stops_and_the_same_call_continues(tmp_path):
    large = {f"w{i}": numpy.full((512, 1024), i, numpy.float32) for i in range(32)}  # 64 MiB
    tessera.save_checkpoint(tmp_path / "run", large, step=1)

    class Enough(Exception):
        pass

    def progress(done, total):
        if done > 0:
            raise Enough

    arguments = {"format": "safetensors", "max_shard_size": "2MiB", "jobs": 1, "memory": "8MiB"}
    with pytest.raises(Enough):
        tessera.consolidate(tmp_path / "run", tmp_path / "out", progress=progress, **arguments)
    report = tessera.consolidate(tmp_path / "run", tmp_path / "out", **arguments)
    assert report["bytes"] == 64 << 20


def test_ctrl_c_stops_within_a_second_and_the_same_call_continues(tmp_path):
    large = {f"w{i:03}": numpy.full((1024, 1024), i, numpy.float32) for i in range(96)}  # 384 MiB
    tessera.save_checkpoint(tmp_path / "run", large, step=1)
    out, arguments = tmp_path / "out", {"format": "safetensors", "max_shard_size": "4MiB", "jobs": 1}
    sent = []

    def interrupt():
        while len(list(tmp_path.glob("out.tmp/*.safetensors"))) < 3:
            time.sleep(0.001)
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        tessera.consolidate(tmp_path / "run", out, **arguments)
    assert time.monotonic() - sent[0] < 1
    thread.join()
    assert not out.exists() and (tmp_path / "out.tmp").exists()
    report = tessera.consolidate(tmp_path / "run", out, **arguments)
    assert report["reused_bytes"] > 0
    assert tessera.open(out)["w095"][0, 0] == 95


def test_other_threads_run_during_a_verification(tmp_path):
    tessera.save_checkpoint(tmp_path / "run", {"w": numpy.zeros((64, 1 << 20), numpy.float32)}, step=1)
    work = threading.Thread(target=tessera.verify, args=(tmp_path / "run",))
    work.start()
    turns = 0
    while work.is_alive():
        turns += 1
        time.sleep(0.001)
    assert turns > 3


def test_damage_is_found(run):
    assert tessera.verify(run)["problems"] == 0
    shard = run / "step-00000003" / "rank-00000-of-00001.safetensors"
    data = bytearray(shard.read_bytes())
    at = data.find(WEIGHTS["matrix"].tobytes())
    data[at + 5] ^= 1
    shard.write_bytes(data)
    with pytest.raises(tessera.Corrupt) as caught:
        tessera.verify(run)
    assert caught.value.file == str(shard)
    assert {problem.tensor for problem in caught.value.problems} <= {"matrix", "optimizer/exp_avg/matrix"}
    with pytest.raises(tessera.Corrupt) as caught:
        checkpoint = tessera.open(run)
        checkpoint["matrix"][0], checkpoint["optimizer/exp_avg/matrix"][0]
    assert caught.value.file == str(shard)
    assert caught.value.tensor in ("matrix", "optimizer/exp_avg/matrix")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.file) == (str(caught.value), str(shard))


def test_errors_have_types(tmp_path):
    with pytest.raises(tessera.Io) as caught:
        tessera.open(tmp_path / "absent")
    assert caught.value.file == str(tmp_path / "absent") and caught.value.tensor is None
    with pytest.raises(tessera.InvalidArgument):
        tessera.open(tmp_path)
    with pytest.raises(tessera.InvalidArgument):
        tessera.open(tmp_path, verify="never")
    assert issubclass(tessera.Corrupt, tessera.Error)


def ranks(count, save):
    """Runs save(rank, exchange) on a thread per rank; returns the results or exceptions."""
    barrier, board, results = threading.Barrier(count), [b""] * count, [None] * count

    def work(rank):
        def exchange(message):
            board[rank] = message
            barrier.wait(20)
            answers = list(board)
            barrier.wait(20)
            return answers

        try:
            results[rank] = save(rank, exchange)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_ranks_save_blocks(tmp_path):
    whole = WEIGHTS["matrix"]

    def save(rank, exchange):
        rows = numpy.array_split(whole, 4)[rank]
        columns = whole[:, 2 * rank:2 * rank + 2]
        return tessera.save_checkpoint(
            tmp_path, {"rows": (rows, whole.shape, (int(rows[0, 0]) // 8, 0)), "columns": (columns, whole.shape, (0, 2 * rank)),
                       "same": WEIGHTS["cube"], "scalar": WEIGHTS["scalar"]},
            step=9, rank=rank, world=4, exchange=exchange, config={"arch": "own"}, trainer={"seen": 5})

    rows = numpy.array_split(whole, 4)
    assert [len(part) for part in rows] == [2, 2, 1, 1]
    results = ranks(4, save)
    assert results[0]["path"] == str(tmp_path / "step-00000009"), results
    assert tessera.verify(tmp_path)["problems"] == 0
    checkpoint = tessera.open(tmp_path)
    for name in ("rows", "columns"):
        numpy.testing.assert_array_equal(checkpoint[name].numpy(), whole)
        numpy.testing.assert_array_equal(checkpoint[name][1:4, 1:5], whole[1:4, 1:5])
    numpy.testing.assert_array_equal(checkpoint["same"].numpy(), WEIGHTS["cube"])
    assert checkpoint["scalar"].numpy() == 7.5
    program = Path(sysconfig.get_path("scripts")) / "tessera"
    subprocess.run([program, "checkpoint", "verify", tmp_path], check=True)


def test_an_error_of_one_rank_is_raised_on_all(tmp_path):
    def save(rank, exchange):
        value = (WEIGHTS["matrix"], (6, 8), (0, 0)) if rank == 0 else object() if rank == 1 else (
            numpy.empty((0, 8), numpy.float32), (6, 8), (0, 0))
        return tessera.save_checkpoint(tmp_path, {"w": value}, step=1, rank=rank, world=3, exchange=exchange)

    results = ranks(3, save)
    assert [type(result) for result in results] == [tessera.Io, tessera.Unsupported, tessera.Io]
    assert "rank 1: Unsupported: w has dtype object" in str(results[0])
    assert not list(tmp_path.iterdir())

    def gap(rank, exchange):
        return tessera.save_checkpoint(tmp_path, {"w": (WEIGHTS["matrix"][:2], (6, 8), (2 * rank, 0))}, step=1,
                                       rank=rank, world=2, exchange=exchange)

    for result in ranks(2, gap):
        assert isinstance(result, tessera.Error) and "w" in str(result)

    class Lost(Exception):
        pass

    def lost(message):
        raise Lost

    with pytest.raises(Lost):
        tessera.save_checkpoint(tmp_path, {"w": WEIGHTS["matrix"]}, step=1, world=2, exchange=lost)
    with pytest.raises(tessera.InvalidArgument, match="exchange"):
        tessera.save_checkpoint(tmp_path, {"w": WEIGHTS["matrix"]}, step=1, world=2)
    assert not list(tmp_path.glob("step-*"))


def test_the_program():
    program = Path(sysconfig.get_path("scripts")) / "tessera"
    for command in ([program, "--version"], [sys.executable, "-m", "tessera", "--version"]):
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == f"tessera {tessera.__version__}"


def test_torch_tensors(tmp_path):
    torch = pytest.importorskip("torch")
    weights = {"b": torch.randn(5, 7).bfloat16(), "f": torch.randn(3, 2).T, "i": torch.arange(4)}
    tessera.save_checkpoint(tmp_path, weights, step=1)
    for name, tensor in tessera.open(tmp_path).items():
        assert torch.equal(torch.from_dlpack(tensor), weights[name])
    narrow = [tensor for tensor in tessera.open(FIXTURES / "dcp" / "fixtures" / "other-dtypes").values()
              if tensor.dtype.startswith("float8")]
    assert narrow
    for tensor in narrow:
        read = torch.from_dlpack(tensor)
        assert read.dtype == getattr(torch, tensor.dtype)
        assert read.view(torch.uint8).tolist() == tensor.raw.numpy().tolist()


DTENSORS = """
import sys, torch, torch.distributed as dist, tessera
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
rank, world = int(sys.argv[1]), 4
dist.init_process_group("gloo", init_method="file://" + sys.argv[2] + "/store", rank=rank, world_size=world)
mesh = init_device_mesh("cpu", (2, 2))
def exchange(message):
    everyone = [None] * world
    dist.all_gather_object(everyone, message)
    return everyone
whole = torch.arange(35, dtype=torch.float32).reshape(5, 7).bfloat16()
tensors = {str(i): distribute_tensor(whole, mesh, placements) for i, placements in enumerate([
    (Replicate(), Shard(0)), (Shard(0), Shard(1)), (Replicate(), Replicate()), (Shard(1), Replicate())])}
tessera.save_checkpoint(sys.argv[2] + "/run", tensors, step=2, rank=rank, world=world, exchange=exchange)
dist.destroy_process_group()
"""


def test_dtensors(tmp_path):
    torch = pytest.importorskip("torch")
    processes = [subprocess.Popen([sys.executable, "-c", DTENSORS, str(rank), str(tmp_path)]) for rank in range(4)]
    assert [process.wait(120) for process in processes] == [0] * 4
    whole = torch.arange(35, dtype=torch.float32).reshape(5, 7).bfloat16()
    checkpoint = tessera.open(tmp_path / "run")
    assert len(checkpoint) == 4
    for tensor in checkpoint.values():
        assert torch.equal(torch.from_dlpack(tensor), whole)
