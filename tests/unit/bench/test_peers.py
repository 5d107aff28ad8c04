"""Peers: the line protocol, runners over stand-ins of vLLM and llama.cpp's server, and figures of their runs."""

import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from jaxspec.bench.grid import DrafterChoice, EnginePoint
from jaxspec.bench.measure import Run, Trace
from jaxspec.bench.peers.sessions import (
    RUNNERS,
    PeerChoice,
    PeerError,
    PeerSession,
    parse_peers,
    peer_figures,
    start_sessions,
)
from jaxspec.errors import ConfigError
from jaxspec.serve.request import SpeculationMetrics

SETUP = {"model": "m", "draft": "d", "k": 3, "dtype": "float32", "rows": 2, "capacity": 64}
NGRAM, PLAIN = EnginePoint(2, DrafterChoice.parse("ngram"), 3), EnginePoint(2, None, 0)
PROMPTS = [[1, 2], [3], [4, 5, 6]]

# Continues each prompt by counting up from its last token.
PEER = f"""
import re
import sys
sys.path.insert(0, {str(RUNNERS)!r})
import wire

class Fake:
    version = "1.0"
    def __init__(self, wanted):
        print("a library talks on standard output")
        if wanted["mode"] == "lookup" and wanted["k"] == 9:
            raise ValueError("no such length")
        if wanted["k"] == 8:
            sys.exit("the library broke")
        self.wanted = wanted
    def run(self, prompts, max_tokens):
        clock = wire.Clock()
        clock.decoding(2)
        clock.decoding(2 + 4)
        short = self.wanted["k"] == 7
        ids = [[p[-1] + 1 + i for i in range(max_tokens - short)] for p in prompts]
        return wire.answer(clock, ids, 4)
    def close(self):
        pass

wire.serve(Fake)
"""
VLLM = """
__version__ = "0.0-fake"
class Named:
    def __init__(self, **given):
        self.__dict__.update(given)
class SamplingParams(Named):
    pass
class Engine:
    def __init__(self, rows):
        self.rows, self.waiting, self.running, self.accepted = rows, [], [], 0
    def add_request(self, name, prompt, params):
        assert params.ignore_eos and params.temperature == 0
        self.waiting.append(Named(request_id=name, ids=[], last=prompt["prompt_token_ids"][-1], most=params.max_tokens))
    def has_unfinished_requests(self):
        return bool(self.waiting or self.running)
    def step(self):
        while self.waiting and len(self.running) < self.rows:
            self.running.append(self.waiting.pop(0))
        found = []
        for r in self.running:
            count = 1 if not r.ids else min(2, r.most - len(r.ids))  # one draft is accepted in every later step
            self.accepted += count - 1
            r.ids += [r.last + 1 + len(r.ids) + i for i in range(count)]
            done = len(r.ids) == r.most
            found.append(Named(request_id=r.request_id, outputs=[Named(token_ids=list(r.ids))], finished=done))
        self.running = [r for r in self.running if len(r.ids) < r.most]
        return found
class LLM:
    def __init__(self, **given):
        assert given["speculative_config"] == {
            "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2
        }, given
        assert (given["max_num_seqs"], given["dtype"], given["max_model_len"]) == (2, "float32", 64)
        self.llm_engine = Engine(given["max_num_seqs"])
    def get_metrics(self):
        name = "vllm:spec_decode_num_accepted_tokens"
        per_place = Named(name=name + "_per_pos", values=[1, 0])
        return [Named(name=name, value=self.llm_engine.accepted), per_place, Named(name="other", value=7)]
"""
# As the real server: a stream has one message per token, none for a token that ends within a character (here 7), and
# a last one with times and no token; accepted drafts come with the token before them.
SERVER = """
import json, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
if "--version" in sys.argv:
    sys.exit("version: 99 (fake)")
asked = dict(zip(sys.argv[1:], sys.argv[2:]))
assert (asked["--spec-type"], asked["--spec-draft-n-max"]) == ("ngram-simple", "3")
assert (asked["-np"], asked["-c"], asked["-t"]) == ("2", "128", "1")
assert (asked["-fa"], asked["--cache-type-k"], asked["--cache-type-v"]) == ("off", "f32", "f32")
slots = threading.Semaphore(2)
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def send(self, data):
        self.wfile.write(b"%x\\r\\n%s\\r\\n" % (len(data), data))
    def begin(self, kind):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
    def do_GET(self):
        self.begin("application/json")
        self.send(b'{"status": "ok"}')
        self.send(b"")
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["ignore_eos"] and body["temperature"] == 0 and not body["cache_prompt"]
        n = body["n_predict"]
        tokens = [body["prompt"][-1] + 1 + i for i in range(n)]
        timings = {"predicted_n": n, "predicted_ms": 500.0, "draft_n": 3, "draft_n_accepted": 2}
        last = {"content": "", "tokens": [], "stop": True, "tokens_predicted": n, "timings": timings}
        if not body.get("stream"):
            self.begin("application/json")
            self.send(json.dumps(last | {"tokens": tokens}).encode())
            return self.send(b"")
        with slots:
            self.begin("text/event-stream")
            for place, token in enumerate(tokens):
                if token != 7:
                    self.event({"content": "x", "tokens": [token], "stop": False, "tokens_predicted": place + 1})
            self.event(last)
            self.send(b"")
    def event(self, value):
        self.send(b"data: " + json.dumps(value).encode() + b"\\n\\n")
    def log_message(self, *args):
        pass
ThreadingHTTPServer(("127.0.0.1", int(asked["--port"])), Handler).serve_forever()
"""


@pytest.fixture
def choice(tmp_path: Path) -> PeerChoice:
    runner = tmp_path / "peer.py"
    runner.write_text(PEER)
    return PeerChoice("transformers", runner=runner)


def counted(prompts: list[list[int]], tokens: int) -> list[list[int]]:
    return [[p[-1] + 1 + i for i in range(tokens)] for p in prompts]


def our_run(token_ids: list[list[int]], decode_time_s: float) -> Run:
    traces = [Trace() for _ in token_ids]
    return Run(token_ids, [], 12, 1.0, 8, decode_time_s, 8, SpeculationMetrics(), traces, {})


def test_protocol_and_figures(choice: PeerChoice):
    sessions, missing = start_sessions([choice], NGRAM, model=Path("m"), dtype="float32", capacity=64)
    assert missing == []
    (peer,) = sessions
    try:
        assert (peer.name, peer.version) == ("transformers lookup", "1.0")
        runs = [peer.run(PROMPTS, 4) for _ in range(2)]
    finally:
        peer.stop()
    assert runs[0].token_ids == counted(PROMPTS, 4)
    assert (runs[0].tokens, runs[0].decode_tokens, runs[0].passes) == (12, 4, 4)
    assert 0 < runs[0].decode_time_s <= runs[0].time_s
    ours = counted(PROMPTS, 4)
    ours[1][2] = 0
    found = peer_figures(peer, runs, [our_run(ours, 1.0), our_run(ours, 2.0)], our_run(ours, 1.0))
    assert (found.same_texts, found.first_differences) == (2, [None, 2, None])
    assert found.tokens_per_step == 3
    assert found.ours is not None
    rates = [run.decode_tokens_per_s for run in runs]
    assert found.ours.most == pytest.approx(max(8 / rates[0], 4 / rates[1]))


@pytest.mark.parametrize(
    ("k", "why"), [(9, "ValueError: no such length"), (8, "it ended.*it last said: the library broke")], ids=str
)
def test_a_peer_that_does_not_load_is_left_out(choice: PeerChoice, k: int, why: str):
    engine = EnginePoint(2, DrafterChoice.parse("ngram"), k)
    sessions, missing = start_sessions([choice], engine, model=Path("m"), dtype="float32", capacity=64)
    assert sessions == []
    assert missing[0].what == f"transformers lookup beside ngram K={k}, 2 rows"
    assert re.search(why, missing[0].reason), missing[0].reason


def test_a_peer_that_answers_short_is_refused(choice: PeerChoice):
    peer = PeerSession(choice, "lookup", {**SETUP, "k": 7})
    try:
        with pytest.raises(PeerError, match="4 tokens for each of 3 prompts"):
            peer.run(PROMPTS, 4)
    finally:
        peer.stop()


def test_a_python_that_is_not_there(tmp_path: Path):
    with pytest.raises(PeerError, match="does not start"):
        PeerSession(PeerChoice("vllm", str(tmp_path / "nowhere")), "plain", SETUP)


def test_vllm_runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "vllm.py").write_text(VLLM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    peer = PeerSession(PeerChoice("vllm"), "ngram", SETUP)
    try:
        runs = [peer.run(PROMPTS, 5) for _ in range(2)]
    finally:
        peer.stop()
    assert peer.version == "0.0-fake"
    for run in runs:
        assert run.token_ids == counted(PROMPTS, 5)
        # Each text is 1 + 2 + 2 tokens in three passes; with two rows, both decode in one gap of 4 tokens only.
        assert run.passes == 3 * 3
        assert run.decode_tokens == 4


def test_vllm_runs_on_the_openmp_that_comes_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(RUNNERS)
    runner, started = import_module("vllm_runner"), []
    monkeypatch.setattr("os.execve", lambda *call: started.append(call))
    library = tmp_path / "libiomp5.so"
    monkeypatch.setenv("LD_PRELOAD", "other.so")
    runner.preload(library)
    assert started == []
    library.touch()
    runner.preload(library)
    ((program, arguments, environment),) = started
    assert (program, arguments) == (sys.executable, sys.orig_argv)
    assert environment["LD_PRELOAD"] == f"other.so {library}"
    monkeypatch.setenv("LD_PRELOAD", environment["LD_PRELOAD"])
    runner.preload(library)
    assert len(started) == 1


def test_llamacpp_runner(tmp_path: Path):
    server = tmp_path / "llama-server"
    server.write_text(f"#!{sys.executable}\n{SERVER}")
    server.chmod(0o755)
    options = {"server": str(server), "gguf": "m.gguf"}
    peer = PeerSession(PeerChoice("llamacpp", options=options), "ngram-simple", SETUP)
    try:
        run = peer.run(PROMPTS, 5)
    finally:
        peer.stop()
    assert "version: 99" in peer.version
    assert run.token_ids == counted(PROMPTS, 5)
    assert run.passes == 9
    assert run.decode_time_s < run.time_s
    with pytest.raises(PeerError, match="convert the model"):
        PeerSession(PeerChoice("llamacpp", options={"server": str(server)}), "plain", SETUP)


def test_streams_of_llamacpp_count_while_all_slots_decode(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(RUNNERS)
    runner, wire = import_module("llamacpp_runner"), import_module("wire")

    def stream(times: list[float], last_s: float) -> list[Any]:
        found = [runner.Event(time_s, [9], count, {}) for count, time_s in enumerate(times, 1)]
        return [*found, runner.Event(last_s, [], len(times), {})]

    clock = wire.Clock()
    # Both decode from 2.0 on, in steps that end at 3.0 (three tokens), at 4.0 and at 5.0; then a third prompt is read.
    runner._replay(clock, [stream([1.0, 3.0, 3.0, 3.0, 5.0], 5.1), stream([2.0, 3.0, 4.0], 6.0), stream([7.0], 8.0)], 2)
    assert (clock.tokens, clock.time_s) == (4 + 1 + 1, 3.0)


def test_modes_answer_our_drafters():
    names = ("transformers", "vllm", "llamacpp")
    draft = EnginePoint(1, DrafterChoice.parse("draft_model=d"), 4)
    auto = EnginePoint(1, DrafterChoice.parse("ngram"), "auto")
    modes = [[PeerChoice(name).mode(engine) for name in names] for engine in (PLAIN, NGRAM, draft, auto)]
    assert modes == [
        ["plain"] * 3, ["lookup", "ngram", "ngram-simple"], ["assistant", "draft_model", "draft-simple"], [None] * 3
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "why"),
    [("sglang=p", "not known"), ("vllm", "vllm=PYTHON"), ("llamacpp=server", r"llamacpp=SERVER,MODEL\.gguf")],
    ids=str,
)
def test_bad_peers_are_refused(text: str, why: str):
    with pytest.raises(ConfigError, match=why):
        parse_peers([text])


def test_peers_are_parsed():
    peers: list[Any] = parse_peers(["transformers=a", "vllm=b", "llamacpp=s,m.gguf", "llamacpp=s,m.gguf,d.gguf"])
    assert [(c.name, c.python, dict(c.options)) for c in peers] == [
        ("transformers", "a", {}), ("vllm", "b", {}),
        ("llamacpp", sys.executable, {"server": "s", "gguf": "m.gguf"}),
        ("llamacpp", sys.executable, {"server": "s", "gguf": "m.gguf", "draft_gguf": "d.gguf"}),
    ]  # fmt: skip
