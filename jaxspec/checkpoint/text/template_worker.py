"""The process that runs chat templates: they are code of strangers, so it has little time, little memory and no files.

Started by ``chat_template`` with the number of a socket and the parent's module path. Each line on the socket is a JSON
request, and each gets a line in answer. A template that takes too long is ended with the process, by a signal that
works inside of one long operation, too (``10 ** 10 ** 9``). Nothing of jaxspec is imported: the process starts quickly.
"""

import json
import resource
import signal
import socket
import sys
from collections import OrderedDict
from contextlib import suppress
from datetime import datetime
from typing import Any, ClassVar

TIME_S, MEMORY_BYTES, TEXT_BYTES = 1.0, 1 << 30, 4 << 20
TEMPLATES = 16
# Reads what Python and Jinja load when they first need it, the way of errors included.
WARM_UP = "{{ strftime_now('%c %Z') ~ '\\u00e9' }}{{ x | pprint }}{{ lipsum(1) }}{{ x.y.z }}"


def main() -> None:
    """Answers requests until the parent goes away."""
    number, path = int(sys.argv[1]), json.loads(sys.argv[2])
    sys.path.extend(folder for folder in path if folder and folder not in sys.path)
    from jinja2 import TemplateError

    templates = Templates()
    for variables in ({"x": {}}, {}):
        with suppress(TemplateError):
            templates.answer({"template": WARM_UP, "variables": variables}, 0)
    _confine()
    with socket.socket(fileno=number) as connection, connection.makefile("rwb") as file:
        for line in file:
            signal.setitimer(signal.ITIMER_PROF, TIME_S)
            try:
                answer = templates.answer(json.loads(line), len(line))
            except MemoryError:
                answer = {"error": "it takes too much memory"}
            except RecursionError:
                answer = {"error": "it is nested too deeply"}
            except TemplateError as error:
                answer = {"error": f"{error.message or type(error).__name__}"}
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            file.write(json.dumps(answer).encode() + b"\n")
            file.flush()
            signal.setitimer(signal.ITIMER_PROF, 0)


def _confine() -> None:
    """Takes from this process what a template has no use for: much memory, and files that are not open yet."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})  # a parent's mask is inherited
    limits = {"AS": MEMORY_BYTES, "CORE": 0, "FSIZE": 0, "NOFILE": 0}
    for name, most in limits.items():
        try:
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
        except (OSError, ValueError):
            continue  # a system without such a limit


class Templates:
    """The templates of late, compiled as transformers compiles them."""

    def __init__(self):
        self.environment = new_environment()
        self._kept: OrderedDict[str, Any] = OrderedDict()

    def answer(self, request: dict[str, Any], size: int) -> dict[str, Any]:
        """Renders a template, or says what it reads where no variables are given."""
        source, variables = request["template"], request.get("variables")
        if variables is None:
            return describe(self.environment, source)
        template = self._kept.pop(source, None) or self.environment.from_string(source)
        self._kept[source] = template
        if len(self._kept) > TEMPLATES:
            self._kept.popitem(last=False)
        pieces, left = [], TEXT_BYTES + 4 * size
        for piece in template.generate(**variables):
            pieces.append(piece)
            left -= len(piece)
            if left < 0:
                return {"error": f"it writes more than {TEXT_BYTES + 4 * size} characters"}
        return {"text": "".join(pieces)}


def new_environment() -> Any:
    """Makes the sandbox with what templates expect from transformers: tags, filters and functions."""
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}`` marks what the assistant says, for training; here it is plain text."""

        tags: ClassVar = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None,
               sort_keys: bool = False) -> str:  # fmt: skip
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    class Dict:
        """``dict`` without the ways from a class to the interpreter."""

        def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
            return dict(*args, **kwargs)

        def fromkeys(self, *args: Any) -> dict[Any, Any]:
            return dict.fromkeys(*args)

    class Namespace(jinja2.utils.Namespace):
        """A namespace without names that Python reserves."""

        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__()
            for name, value in dict(*args, **kwargs).items():
                self[name] = value

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise jinja2.TemplateError(f"a namespace takes no name with an underscore at its start, got {name}")
            super().__setitem__(name, value)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.globals["dict"], environment.globals["namespace"] = Dict(), Namespace
    return environment


def describe(environment: Any, source: str) -> dict[str, Any]:
    """Returns a template's variables, whether it goes through a content's parts, and whether it tells strings."""
    from jinja2 import nodes

    tree = environment.parse(source)
    reads = {name.name for name in tree.find_all(nodes.Name) if name.ctx == "load"}
    tells = any(test.name == "string" for test in tree.find_all(nodes.Test))
    return {"reads": sorted(reads), "parts": goes_through_parts(tree), "tells_strings": tells}


def goes_through_parts(tree: Any) -> bool:
    """Whether a loop of a template goes through what a message calls its content."""
    from jinja2 import nodes

    names: set[str] = set()
    while not names >= (more := _holders_of_content(tree, names)):
        names |= more
    return any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))


def _holders_of_content(tree: Any, names: set[str]) -> set[str]:
    """Variables and macros' arguments that are given a content, directly or by one of these names."""
    from jinja2 import nodes

    macros = {macro.name: macro.args for macro in tree.find_all(nodes.Macro)}
    calls = [call for call in tree.find_all(nodes.Call) if getattr(call.node, "name", None) in macros]
    given = [(assign.target, assign.node) for assign in tree.find_all(nodes.Assign)]
    given += [pair for call in calls for pair in zip(macros[call.node.name], call.args, strict=False)]
    return {target.name for target, value in given if isinstance(target, nodes.Name) and _is_content(value, names)}


def _is_content(node: Any, names: set[str]) -> bool:
    from jinja2 import nodes

    if isinstance(node, nodes.Filter) or (isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)):
        return _is_content(node.node, names)
    if isinstance(node, nodes.CondExpr):
        return _is_content(node.expr1, names) or _is_content(node.expr2, names)
    if isinstance(node, nodes.Getitem):
        return getattr(node.arg, "value", None) == "content"
    return getattr(node, "attr", None) == "content" or (isinstance(node, nodes.Name) and node.name in names)


if __name__ == "__main__":
    main()
