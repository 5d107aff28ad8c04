"""Chat templates as strangers write them: bounded in time and memory, and with what transformers offers them."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from jaxspec.checkpoint.text import chat_template
from jaxspec.checkpoint.text.chat_template import ChatTemplate
from jaxspec.errors import RequestError

TALK = {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": True}
SIMPLE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def write(source: str, **variables: Any) -> str:
    return ChatTemplate.of(source).render(variables)


LOOPS = "{% for a in range(100000) %}" * 3 + "{% endfor %}" * 3
BOMBS = [
    (LOOPS, "1 s of processor time"),
    ("{{ 10 ** (10 ** 9) }}", "processor time|memory"),
    ("{{ lipsum(n=100000) }}", "processor time|memory"),
    ("{{ 'a' * 9999999999 }}", "memory"),
    ("{% set a = 'a' * 9999999999 %}", "memory"),
    ("{{ [1] * 9999999999 }}", "memory"),
    ("{{ 'a' | center(9999999999) }}", "memory"),
    ("{{ '%9999999999d' % 1 }}", "memory"),
    ("{{ '{:9999999999}'.format(1) }}", "memory"),
    ("{{ [1] | tojson(indent=9999999999) }}", "memory"),
    ("{% set n = namespace(x='ab') %}{% for a in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}", "memory|time"),
    ("{% for a in range(9999) %}{{ 'a' * 9999 }}{% endfor %}", "more than [0-9]+ characters"),
    ("{{ range(999999999) | list }}", "Range too big"),
    ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "nested too deeply"),
    ("{{" + "(" * 5000 + "1" + ")" * 5000 + "}}", "nested too deeply"),
]


@pytest.mark.parametrize(("source", "says"), BOMBS, ids=range(len(BOMBS)))
def test_bombs_are_one_error_each(source: str, says: str):
    used = os.times()
    with pytest.raises(RequestError, match=rf"the chat template .*(?:{says})") as caught:
        write(source)
    assert "\n" not in str(caught.value)
    after = os.times()
    assert after.user + after.system - used.user - used.system < 1, "this process does not do the work"
    assert write(SIMPLE, **TALK) == "[user]hi", "the next conversation is written"


def test_what_is_dangerous_is_refused():
    for source in (
        "{{ ().__class__.__bases__[0].__subclasses__() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% set n = namespace() %}{% set n.__class__ = 1 %}",
        "{{ namespace(__x=1) }}",
        "{% include '/etc/passwd' %}",
        "{{ messages.append(1) }}",
    ):
        with pytest.raises(RequestError, match="the chat template refuses them"):
            write(source, **TALK)


def test_no_file_can_be_opened_where_templates_run():
    write(SIMPLE, **TALK)
    process = chat_template._WORKER._process
    assert process is not None
    with open(f"/proc/{process.pid}/limits") as file:
        limits = {line[:25].strip(): line[26:].split()[0] for line in file}
    assert limits["Max open files"] == limits["Max file size"] == limits["Max core file size"] == "0"
    assert int(limits["Max address space"]) == 1 << 30


def test_what_transformers_offers():
    assert write("{{ {'é': [1, 2]} | tojson }}{{ [1] | tojson(indent=1) }}") == '{"é": [1, 2]}[\n 1\n]'
    assert write("{{ strftime_now('%Y') }}") == time.strftime("%Y")
    assert write("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "1"
    assert write("a{% generation %}b{{ x }}{% endgeneration %}c", x=1) == "ab1c"
    assert write("{% set n = namespace(a=1) %}{% set n.a = n.a + 1 %}{{ n.a }}{{ dict(b=2) }}") == "2{'b': 2}"
    assert write("{{ dict.fromkeys(['a'], 1) }}") == "{'a': 1}"
    assert write("  {% if true %}\nx\n  {% endif %}\ny") == "x\ny", "blocks take their line's space away"
    with pytest.raises(RequestError, match=r"refuses them \(only one turn\)"):
        write("{{ raise_exception('only\\n one turn') }}")
    with pytest.raises(RequestError, match=r"refuses them \('x' is undefined\)"):
        write("{{ x.y }}")
    with pytest.raises(RequestError, match=r"refuses them \(.*endfor"):
        write("{% for a in b %}")
    with pytest.raises(RequestError, match="takes JSON values"):
        write(SIMPLE, messages=[{1j}])


def test_what_a_template_reads():
    template = ChatTemplate.of("{% set thinks = thinks | default(true) %}{% if tools %}{{ bos_token }}{% endif %}")
    assert template.reads == {"thinks", "tools", "bos_token"}


@pytest.mark.parametrize(
    ("source", "parts", "strings"),
    [
        (SIMPLE, False, False),
        ("{% for m in messages %}{{ m['content'] | trim }}{% for c in m.tool_calls %}{% endfor %}{% endfor %}", False,
         False),
        ("{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}", True, False),
        ("{% for p in messages[0]['content'] | list %}{% endfor %}", True, False),
        ("{% set c = m.content if m.content is string else m.content[1:] %}{% for p in c %}{% endfor %}", True, True),
        ("{% macro show(content) %}{% if content is string %}{{ content }}{% else %}{% for i in content %}{% endfor %}"
         "{% endif %}{% endmacro %}{% for m in messages %}{{ show(m.content) }}{% endfor %}", True, True),
        ("{% set a = m.content %}{% set b = a %}{% for p in b %}{% endfor %}", True, False),
    ],
)  # fmt: skip
def test_templates_that_go_through_parts(source: str, parts: bool, strings: bool):
    template = ChatTemplate.of(source)
    assert (template.parts, template.tells_strings) == (parts, strings)


def test_any_thread_may_write():
    names = [f"n{i}" for i in range(64)]
    template = ChatTemplate.of("{{ name * 500 }}")
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda name: template.render({"name": name}), names))
    assert texts == [name * 500 for name in names]


def test_a_conversation_takes_less_than_a_millisecond():
    template = ChatTemplate.of(SIMPLE)
    times = []
    for _ in range(200):
        began = time.perf_counter()
        template.render(TALK)
        times.append(time.perf_counter() - began)
    assert sorted(times)[20] < 1e-3, "0.15 ms here"


def test_a_process_that_was_ended_is_started_again():
    template = ChatTemplate.of(SIMPLE)
    template.render(TALK)
    process = chat_template._WORKER._process
    assert process is not None
    process.kill()
    process.wait()
    assert template.render(TALK) == "[user]hi"
    assert chat_template._WORKER._process is not process


def test_an_interrupt_reaches_the_caller():
    template = ChatTemplate.of(LOOPS)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            template.render({})
    finally:
        signal.signal(signal.SIGALRM, before)
    assert write(SIMPLE, **TALK) == "[user]hi"


def test_a_process_that_answers_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch):
    template = ChatTemplate.of(SIMPLE)
    monkeypatch.setattr(chat_template, "PATIENCE_S", 0.2)
    chat_template._WORKER.end()
    template = ChatTemplate.of(LOOPS)
    with pytest.raises(RequestError, match=r"took more than 0\.2 s"):
        template.render({})
    monkeypatch.undo()
    assert write(SIMPLE, **TALK) == "[user]hi"


def test_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch):
    template = ChatTemplate.of(SIMPLE)
    chat_template._WORKER.end()
    monkeypatch.setattr("sys.executable", "/nonexistent/python")
    with pytest.raises(RequestError, match=r"no process can be started .*No such file"):
        template.render(TALK)
    monkeypatch.undo()
    assert template.render(TALK) == "[user]hi"


FORKED = """
import os, sys
from jaxspec.checkpoint.text.chat_template import ChatTemplate
template = ChatTemplate.of("{{ x }}")
assert template.render({"x": 1}) == "1"
child = os.fork()
if child == 0:
    os._exit(0 if template.render({"x": 2}) == "2" else 1)
assert os.waitpid(child, 0)[1] == 0
assert template.render({"x": 3}) == "3"
"""


def test_a_fork_has_a_process_of_its_own():
    done = subprocess.run([sys.executable, "-W", "error", "-c", FORKED], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
