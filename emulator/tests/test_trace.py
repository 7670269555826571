"""Recorded runs are what the kernels do, step by step."""

import json
import pathlib
import re
import shutil
import subprocess

import pytest

from emulator import programs, trace
from kernel_fusion import cli
from kernel_fusion.console import UserError

PROGRAM = """\
#include <cuda_runtime.h>

__device__ int came;

__global__ void transpose(const float* x, float* y) {
  __shared__ float tile[4][4];
  tile[threadIdx.y][threadIdx.x] = x[4 * threadIdx.y + threadIdx.x];
  BARRIER;
  y[4 * threadIdx.y + threadIdx.x] = tile[threadIdx.x][threadIdx.y];
}

__global__ void block_sum(const int* x, int* y) {
  extern __shared__ int sums[];
  const int t = threadIdx.x;
  sums[t] = x[blockIdx.x * blockDim.x + t];
  __syncthreads();
  for (int half = blockDim.x / 2; half > 0; half /= 2) {
    if (t < half) sums[t] += sums[t + half];
    __syncthreads();
  }
  if (t == 0) y[blockIdx.x] = sums[0];
}

__global__ void lanes(float* y) {
  const float next = __shfl_down_sync(0xffffffffu, 1.5f * threadIdx.x, 1);
  if (threadIdx.x < 2) y[threadIdx.x] = next;
  for (int poll = 0; threadIdx.x == 31 && poll < 3; ++poll) atomicAdd(&came, 0);
  if (threadIdx.x == 31) atomicAdd(&came, 5);
}

__global__ void vectors(const float4* x, float4* y) { y[threadIdx.x] = x[threadIdx.x + 1]; }

__global__ void stuck(int* y) {
  if (threadIdx.x == 0) return;
  __syncthreads();
  y[threadIdx.x] = 1;
}

int main(int argc, char**) {
  float *x, *y;
  int *whole, *sums;
  cudaMallocManaged(&x, 64);
  cudaMallocManaged(&y, 64);
  cudaMallocManaged(&whole, 64);
  cudaMallocManaged(&sums, 64);
  for (int i = 0; i < 16; ++i) x[i] = 100 + i, whole[i] = i * i;
  transpose<<<1, dim3(4, 4)>>>(x, y);
  block_sum<<<3, 4, 16>>>(whole, sums);
  lanes<<<1, 32>>>(y);
  vectors<<<1, 2>>>(reinterpret_cast<float4*>(x), reinterpret_cast<float4*>(y));
  if (argc > 1) stuck<<<1, 2>>>(sums);
  cudaDeviceSynchronize();
  return 7;
}
"""
LINES = {text.strip(): number for number, text in enumerate(PROGRAM.splitlines(), start=1)}


def line(text: str) -> int:
    return next(number for known, number in LINES.items() if text in known)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Records a launch of PROGRAM, which is compiled once, and once more without the transpose's barrier."""
    folder = tmp_path_factory.mktemp("house")
    (folder / "program.cu").write_text(PROGRAM)

    def run(launch: int, barrier: str = "__syncthreads()", code: int = 7, **options) -> dict:
        flags = (f"-DBARRIER={barrier}",)
        found, made = trace.record(folder / "program.cu", launch=launch, compiler_flags=flags, **options)
        assert found == code
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "BUILD", folder / "build")
        yield run


def test_a_transpose_is_recorded_exactly(recorded):
    found = recorded(1)
    names = [array["name"] for array in found["arrays"]]
    assert names == ["x", "tile", "y"]
    assert [array["space"] for array in found["arrays"]] == ["global", "shared", "global"]
    assert found["arrays"][1]["shape"] == [4, 4]
    load, wait, store = line("= x[4"), line("BARRIER"), line("= tile[")
    want = []
    for t in range(16):
        at = {"block": 0, "thread": t}
        want += [
            {"what": "read", **at, "line": load, "array": 0, "index": t, "values": [100.0 + t]},
            {"what": "write", **at, "line": load, "array": 1, "index": t, "before": ["nan"], "values": [100.0 + t]},
            {"what": "wait", **at, "line": wait, "name": "__syncthreads"},
        ]
    want.append({"what": "go on", "block": 0, "threads": list(range(16))})
    for t in range(16):
        at, turned = {"block": 0, "thread": t}, t % 4 * 4 + t // 4
        want += [
            {"what": "read", **at, "line": store, "array": 1, "index": turned, "values": [100.0 + turned]},
            {
                "what": "write",
                **at,
                "line": store,
                "array": 2,
                "index": t,
                "before": ["nan"],
                "values": [100.0 + turned],
            },
            {"what": "exit", **at},
        ]
    assert found["events"] == want
    assert found["grid"] == [1, 1, 1]
    assert found["block"] == [4, 4, 1]
    assert found["kernel"] == "transpose"
    assert found["source"]["lines"] == PROGRAM.splitlines()


def test_a_missing_barrier_is_seen(recorded):
    events = recorded(1, barrier="")["events"]
    early = [event for event in events if event["what"] == "read" and event["array"] == 1]
    assert early[1]["thread"] == 1
    assert early[1]["index"] == 4
    assert early[1]["values"] == ["nan"]
    # Thread 4 reads what thread 1 wrote, and writes what thread 1 has read.
    marks = {(event["what"], event["thread"]): events[event["unordered"]] for event in events if "unordered" in event}
    assert marks["read", 4]["thread"] == 1
    assert marks["read", 4]["what"] == "write"
    assert marks["write", 4]["thread"] == 1
    assert marks["write", 4]["what"] == "read"
    assert ("read", 5) not in marks  # its own


def sums_of(block: int, order: list[int]) -> list[tuple]:
    """What block_sum does, as (what, thread, array, index, value)."""
    numbers = [(4 * block + t) ** 2 for t in range(4)]
    found = []
    for t in order:
        found += [("read", t, "x", 4 * block + t, numbers[t]), ("write", t, "sums", t, numbers[t]), ("wait", t)]
    found.append(("go on",))
    for half in (2, 1):
        for t in order:
            if t < half:
                found += [("read", t, "sums", t, numbers[t]), ("read", t, "sums", t + half, numbers[t + half])]
                numbers[t] += numbers[t + half]
                found.append(("write", t, "sums", t, numbers[t]))
            found.append(("wait", t))
        found.append(("go on",))
    for t in order:
        if t == 0:
            found += [("read", 0, "sums", 0, numbers[0]), ("write", 0, "y", block, numbers[0])]
        found.append(("exit", t))
    return found


def shortened(found: dict, block: int) -> list[tuple]:
    events = []
    for event in found["events"]:
        if event["block"] != block:
            continue
        assert "unordered" not in event
        one = (event["what"], *([event["thread"]] if "thread" in event else []))
        if "index" in event:
            one += (found["arrays"][event["array"]]["name"], event["index"], *event["values"])
        events.append(one)
    return events


@pytest.mark.parametrize(("schedule", "order"), [("forward", [0, 1, 2, 3]), ("reverse", [3, 2, 1, 0])])
def test_a_block_sum_is_recorded_exactly_in_both_orders(recorded, schedule, order):
    found = recorded(2, schedule=schedule)
    assert found == recorded(2, schedule=schedule)
    assert {event["block"] for event in found["events"]} == {0, 1}  # of three blocks
    for block in (0, 1):
        assert shortened(found, block) == sums_of(block, order)


def test_blocks_and_threads_are_chosen(recorded):
    events = recorded(2, blocks="2", threads="1-2")["events"]
    assert {event["block"] for event in events} == {2}
    assert {event["thread"] for event in events if "thread" in event} == {1, 2}
    assert {tuple(event["threads"]) for event in events if event["what"] == "go on"} == {(1, 2)}


def test_shuffles_and_atomics_have_their_values(recorded):
    found = recorded(3)
    events = found["events"]
    waits = [event for event in events if event["what"] == "wait"]
    assert [(event["gives"], event["from"]) for event in waits] == [(1.5 * t, min(t + 1, 31)) for t in range(32)]
    meeting = next(event for event in events if event["what"] == "go on")
    assert meeting["gets"] == [1.5 * min(t + 1, 31) for t in range(32)]
    atomics = [event for event in events if event["what"] == "atomic"]
    assert {found["arrays"][event["array"]]["name"] for event in atomics} == {"came"}
    said = [(event["thread"], event["before"], event["values"]) for event in atomics]
    assert said == [(31, [0], [0]), (31, [0], [5])]  # of several looks that find the same, one


def test_a_vector_is_one_access_of_four_cells(recorded):
    events = recorded(4)["events"]
    moves = [(event["what"], event["index"], event["values"]) for event in events if "index" in event]
    first, second = [104.0, 105.0, 106.0, 107.0], [108.0, 109.0, 110.0, 111.0]
    assert moves == [("read", 4, first), ("write", 0, first), ("read", 8, second), ("write", 4, second)]


def test_what_never_ends_is_recorded_up_to_there(recorded, monkeypatch):
    monkeypatch.setenv("KF_SIMT_EXITED", "error")
    found = recorded(5, arguments=["stuck"], code=1)
    assert "did not reach: it has exited" in found["error"]
    assert [(event["what"], event["thread"]) for event in found["events"]] == [("exit", 0), ("wait", 1)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"launch": 9}, "it has no launch 9"),
        ({"launch": 1, "blocks": "1-2"}, r"nothing happens there; the grid is \[1, 1, 1\]"),
        ({"launch": 1, "threads": "16"}, "nothing happens there"),
    ],
)
def test_what_is_not_there_is_an_error(recorded, options, message):
    with pytest.raises(UserError, match=message):
        recorded(**options)


def test_too_many_events_are_an_error(recorded, monkeypatch):
    number = len(recorded(1)["events"])
    monkeypatch.setattr(trace, "MOST", number)
    recorded(1)
    monkeypatch.setattr(trace, "MOST", number - 1)
    with pytest.raises(UserError, match=f"more than {number - 1} events; record fewer: --trace-blocks 0"):
        recorded(1)


def data_of(page: str) -> dict:
    found = re.search(r'<script type="application/json">(.*?)</script>', page, re.DOTALL)
    return json.loads(found[1], parse_constant=pytest.fail)


@pytest.mark.parametrize(
    ("wait", "second", "what", "marked"),
    [
        ("__syncthreads", 40, "read", False), ("__syncwarp", 1, "read", False), ("__syncwarp", 40, "read", True),
        ("__shfl_sync", 1, "read", True), (None, 1, "write", True), (None, 0, "write", False),
        (None, 1, "atomic", True),
    ],
)  # fmt: skip
def test_what_orders_two_accesses(wait, second, what, marked):
    at = {"array": 0, "index": 5, "values": [1]}
    events = [{"what": "write", "block": 0, "thread": 0, **at}]
    if wait:
        events += [{"what": "wait", "block": 0, "thread": thread, "name": wait} for thread in (0, second)]
        events.append({"what": "go on", "block": 0, "threads": [0, second]})
    events.append({"what": what, "block": 0, "thread": second, **at})
    trace.mark_unordered(events)
    assert ("unordered" in events[-1]) == marked


def test_a_page_holds_the_trace_and_needs_nothing_else():
    source = {"name": "f.cu", "lines": ["</script><b>&"]}
    found = {"kernel": "f<int>", "grid": [1, 1, 1], "block": [1, 1, 1], "source": source, "arrays": [], "events": []}
    page = trace.page(found)
    assert data_of(page) == found
    assert "http" not in page.replace(page[page.index("{") : page.rindex("}")], "")
    assert not re.search(r"\b(src|href)=|@import|url\(|fetch\(", page)
    assert trace.html(found) in page


@pytest.mark.tools
def test_a_browser_shows_an_event(recorded, tmp_path):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs chromium")
    trace.save(recorded(1, barrier=""), tmp_path / "run.html")
    events = recorded(1, barrier="")["events"]
    number = next(i for i, event in enumerate(events, 1) if event.get("values") == ["nan"])
    command = [browser, "--headless", "--no-sandbox", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    address = f"{(tmp_path / 'run.html').as_uri()}#event={number}"
    shown = subprocess.run([*command, address], capture_output=True, text=True, timeout=1800).stdout
    assert "thread (1, 0) reads nan from tile[1][0]" in shown
    assert "Nobody has written it yet." in shown
    assert re.search(
        rf'class="kf-now"[^>]*data-n="{line("= tile[")}"|data-n="{line("= tile[")}"[^>]*class="kf-now"', shown
    )


def test_the_command_writes_both_forms(recorded, tmp_path, capsys, monkeypatch):
    recorded(1)  # where it is compiled
    source = tmp_path / "program.cu"
    source.write_text(PROGRAM.replace("BARRIER", "__syncthreads()"))
    options = ["simt", str(source), "--trace-launch", "2", "--trace-blocks", "1"]
    for name in ("run.json", "run.html"):
        assert cli.main([*options, "--trace", str(tmp_path / name)]) == 7
        assert f"{name}: 38 events of block_sum" in " ".join(capsys.readouterr().out.split())
    found = json.loads((tmp_path / "run.json").read_text())
    assert data_of((tmp_path / "run.html").read_text()) == found
    assert found["launch"] == 2
    assert found["blocks"] == "1"
    assert cli.main([*options, "--trace", str(tmp_path / "run.txt")]) == 1
    assert "must end in .json or .html" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["program.cu", "run.html", "run.json"]


@pytest.mark.parametrize(
    ("declared", "names"),
    [
        ("__global__ void f(const float* x, int n) {", ["x", "n"]),
        (
            "template <class T> __global__ void __launch_bounds__(128) f(const T* __restrict__ x, Pair<int, T> p) {",
            ["x", "p"],
        ),
        ("__global__ void f(int n);  // f(int m) {\n__global__ void f(float* out, /* in */ float a) {", ["out", "a"]),
        ("__global__ void g(int n) {", []),
    ],
)
def test_a_kernels_parameters_have_names(declared, names):
    assert trace.parameters([declared], "f") == names


def test_the_type_of_an_array_is_read():
    array = trace.Array("", "shared", 0, 32, "const float4 [2]")
    assert (array.type, array.shape, array.element) == ("float", [2, 4], 4)
    assert trace.Array("", "", 0, 4, "kf::simt::__nv_bfloat16").numbers(bytes.fromhex("803f40c0")) == [1.0, -3.0]
    assert trace.Array("", "", 0, 4, "__half").numbers(bytes.fromhex("003c007e")) == [1.0, "nan"]
    assert trace.Array("", "", 0, 4, "int").numbers(bytes.fromhex("ffffffff")) == [-1]
    assert pathlib.Path(trace.FOLDER / "viewer.js").exists()
