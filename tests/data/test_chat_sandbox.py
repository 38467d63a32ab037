"""What a chat template from a stranger cannot do: reach out, run for ever, fill the memory."""

from __future__ import annotations

import threading
import tracemalloc

import jinja2
import pytest

from jaxrl.data.chat_limits import LARGEST
from jaxrl.data.chat_sandbox import compile_template, render_template
from jaxrl.errors import DataError

MESSAGES = [{"role": "user", "content": "hi"}]


def rendered(source, **variables):
    template = compile_template(source, "some.jinja")
    return render_template(template, {"messages": MESSAGES, **variables}, name="some.jinja")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ''.__class__ }}",
        "{{ ''['__class__'] }}",
        "{{ ''['__cla' ~ 'ss__'] }}",
        "{{ ''|attr('__class__') }}",
        "{{ [1]|map(attribute='__class__')|list }}",
        "{{ [1]|selectattr('__class__')|list }}",
        "{{ [1]|sort(attribute='__class__') }}",
        "{{ [1]|groupby('__class__') }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ '{0[__class__]}'.format('') }}",
        "{{ '{a.__class__}'.format_map({'a': 1}) }}",
        "{% set f = '{0.__class__}'.format %}{{ [1]|map(f)|list }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ joiner.__init__ }}",
        "{{ namespace.__init__ }}",
        "{{ dict.fromkeys('ab') }}",
        "{{ range.__call__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ self.__init__ }}",
        "{{ self._TemplateReference__context }}",
        "{% for i in [1] %}{{ loop.__init__ }}{% endfor %}",
        "{% macro f() %}{% endmacro %}{{ f._func }}",
        "{% macro f() %}{% endmacro %}{{ f.__call__ }}",
        "{% set ns = namespace() %}{{ ns._Namespace__attrs }}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ (1).to_bytes(9, 'big') }}",
        "{{ 'a'.encode() }}",
        "{{ 'a'.translate({}) }}",
        "{{ ({}.items()|list).__len__() }}",
        "{{ (messages|map('upper')).gi_frame }}",
        "{{ lipsum(1) }}",
        "{{ caller() }}",
        "{% include 'other' %}",
        "{% import 'other' as other %}",
        "{% from 'other' import thing %}",
        "{% extends 'other' %}",
    ],
)
def test_template_that_reaches_outside_raises(source):
    with pytest.raises(DataError, match="some.jinja"):
        rendered(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ messages.clear() }}",
        "{{ messages.pop() }}",
        "{{ messages.sort() }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ messages[0].pop('role') }}",
        "{{ messages[0].setdefault('a', 1) }}",
        "{% set messages[0].role = 'x' %}",
        "{% set _ = messages[0].__setitem__('role', 'x') %}",
    ],
)
def test_template_that_modifies_its_arguments_raises(source):
    messages = [{"role": "user", "content": "hi"}]

    with pytest.raises(DataError, match="some.jinja"):
        rendered(source, messages=messages)

    assert messages == MESSAGES


NS = "{% set ns = namespace(s=START) %}{% for i in range(60) %}{% set ns.s = NEXT %}{% endfor %}"


def repeat(start, following):
    """A value that gets larger sixty times over."""
    return NS.replace("START", start).replace("NEXT", following)


ENDLESS = {
    "nested loops": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    ),
    "loop whose condition fails": (
        "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}"
    ),
    "long range": "{% for i in range(10**9) %}{% endfor %}",
    "macro of itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "macro of two of itself": (
        "{% macro f(n) %}{% if n %}{% set a = f(n - 1) %}{% set b = f(n - 1) %}{% endif %}"
        "{% endmacro %}{{ f(60) }}"
    ),
    "recursive loop": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "block of itself": "{% block a %}{{ self.a() }}{% endblock %}",
    "slices": (
        "{% set s = 'a' * 4000000 %}{% for i in range(99999) %}{% set x = s[1:] %}{% endfor %}"
    ),
    "comparisons": (
        "{% set s = 'a' * 4000000 %}{% set t = 'a' * 4000000 %}"
        "{% for i in range(99999) %}{% if s == t %}{% endif %}{% endfor %}"
    ),
    "chained comparisons": (
        "{% set s = 'a' * 4000000 %}{% set t = 'a' * 4000000 %}"
        "{% for i in range(99999) %}{% if s == t == s %}{% endif %}{% endfor %}"
    ),
    "comparing tests": (
        "{% set s = 'a' * 4000000 %}{% set t = 'a' * 4000000 %}"
        "{% for i in range(99999) %}{% if s is eq t %}{% endif %}{% endfor %}"
    ),
    "searches": (
        "{% set s = 'a' * 4000000 %}{% for i in range(99999) %}{% set x = 'b' in s %}{% endfor %}"
    ),
    "searches in a list": (
        "{% set s = range(9999)|list %}{% for i in range(99999) %}{% set x = -1 in s %}{% endfor %}"
    ),
    "methods": (
        "{% set s = 'a' * 4000000 %}{% for i in range(99999) %}{% set x = s.upper() %}{% endfor %}"
    ),
    "filters": (
        "{% set s = 'a' * 4000000 %}{% for i in range(99999) %}{% set x = s|upper %}{% endfor %}"
    ),
    "methods that grow": "{% for i in range(99999) %}{% set x = 'a'.center(999999) %}{% endfor %}",
    "methods that fill": "{% for i in range(99999) %}{% set x = '1'.zfill(999999) %}{% endfor %}",
    "filters that grow": "{% for i in range(99999) %}{% set x = 'a'|center(999999) %}{% endfor %}",
    "unpacked arguments": (
        "{% for i in range(99999) %}{% set x = cycler(*range(99999)) %}{% endfor %}"
    ),
    "filters on items": (
        "{% for i in range(99999) %}{% set x = range(99999)|map('string')|list %}{% endfor %}"
    ),
    "rfind": "{% set s = 'a' * 4000000 %}{{ s.rfind('b' + 'a' * 2000000) }}",
    "strip": "{% set s = 'a' * 4000000 %}{{ s.strip('b' * 2000000 + 'a') }}",
    "trim": "{{ ('a' * 2000000)|trim('b' * 2000000 + 'a') }}",
    "rounding": "{{ 1|round(10**8, 'ceil') }}",
    "rounding, not that far": "{{ 1|round(10**6, 'ceil') }}",
    "slices of nothing": "{{ [1]|slice(10**9)|list }}",
    "sums of lists": "{{ [[1], [2]]|sum(start=[]) }}",
    "tuples as keys": "{{ {(1, 2): 3} }}",
    "tuples as arguments": "{{ messages[0][(1, 2)] }}",
}

GROWING = {
    "join of an iterator": "{{ ('a' * 1000).join(range(99999)|map('string')) }}",
    "repeated text": "{{ 'a' * 10**10 }}",
    "repeated by text": "{{ 10**10 * 'a' }}",
    "repeated list": "{{ [1, 2] * 10**9 }}",
    "repeated tuple": "{{ (1, 2) * 10**9 }}",
    "power": "{{ 2 ** (10**9) }}",
    "power of powers": "{{ 10 ** 10 ** 10 ** 10 ** 10 }}",
    "squares": repeat("3", "ns.s * ns.s"),
    "number in a large base": "{{ ('f' * 4000000)|int(0, 16) }}",
    "center": "{{ 'a'|center(10**10) }}",
    "center, the method": "{{ 'a'.center(10**8) }}",
    "ljust": "{{ 'a'.ljust(10**8) }}",
    "zfill": "{{ '1'.zfill(10**8) }}",
    "percent": '{{ "%1000000000d" % 1 }}',
    "percent with a star": '{{ "%*d" % (10**9, 1) }}',
    "percent with a key": '{{ "%(a(b))99999999d" % {"a(b)": 1} }}',
    "percent with a precision": '{{ "%.999999999f" % 1 }}',
    "percent many times": "{{ ('%999d' * 100000) % ((1,) * 100000) }}",
    "format, the filter": '{{ "%999999999d"|format(1) }}',
    "format": '{{ "{:>1000000000}".format(1) }}',
    "format with a field": '{{ "{:{}}".format(1, 1000000000) }}',
    "format_map": '{{ "{a:>1000000000}".format_map({"a": 1}) }}',
    "format of much": "{{ ('{0}' * 10000).format('a' * 10000) }}",
    "indent": "{{ 'a\nb'|indent(10**9) }}",
    "indent of many lines": "{{ ('a\n' * 10000)|indent(10**6) }}",
    "indent with text": "{{ ('a\n' * 10000)|indent('a' * 10000) }}",
    "tojson with indent": "{{ (range(9999)|list)|tojson(indent=10000) }}",
    "tojson with text": "{{ (range(9999)|list)|tojson(indent='a' * 10000) }}",
    "tojson with separators": "{{ (range(9999)|list)|tojson(separators=('a' * 10000, ':')) }}",
    "join": "{{ range(99999)|join('a' * 1000) }}",
    "join, the method": "{{ ('a' * 1000).join(['b'] * 9999) }}",
    "replace": "{{ ('a' * 9999)|replace('a', 'b' * 9999) }}",
    "replace with much more": "{{ ('a' * 2000000)|replace('', 'b' * 2000000) }}",
    "replace with much more, the method": "{{ ('a' * 2000000).replace('', 'b' * 2000000) }}",
    "replace, the method": "{{ ('a' * 9999).replace('', 'b' * 9999) }}",
    "batch": "{{ [1]|batch(10**9, 0)|list }}",
    "truncate": "{{ 'a'|truncate(10**9) }}",
    "range in a list": "{{ [range(99999)|list, range(99999)|list, range(99999)|list] }}",
    "doubling with +": repeat("'ab'", "ns.s + ns.s"),
    "doubling with ~": repeat("'ab'", "ns.s ~ ns.s"),
    "doubling with *": repeat("'ab'", "ns.s * 2"),
    "doubling with join": repeat("'ab'", "[ns.s, ns.s]|join"),
    "doubling with replace": repeat("'aa'", "ns.s.replace('a', ns.s)"),
    "doubling with format": repeat("'aa'", "'{0}{0}'.format(ns.s)"),
    "doubling with percent": repeat("'aa'", "'%s%s' % (ns.s, ns.s)"),
    "doubling with escapes": repeat("'<'", "ns.s|e|string ~ ns.s"),
    "doubling with quotes": repeat("'\"'", "ns.s|tojson"),
    "doubling lists": repeat("[1]", "[ns.s, ns.s]"),
    "doubling tuples": repeat("(1,)", "(ns.s, ns.s)"),
    "doubling mappings": repeat("1", "{'a': ns.s, 'b': ns.s}"),
    "doubling with dict": repeat("1", "dict(a=ns.s, b=ns.s)"),
    "doubling views": repeat("1", "dict(a=ns.s, b=ns.s).items()"),
    "doubling with batch": repeat("[1]", "[[ns.s], [ns.s]]|batch(2)|list"),
    "doubling with + of lists": repeat("[1]", "ns.s + ns.s"),
    "doubling with arguments": (
        "{% set ns = namespace(s=1) %}{% macro f() %}{% set ns.s = varargs %}{% endmacro %}"
        "{% for i in range(60) %}{{ f(ns.s, ns.s) }}{% endfor %}{{ ns.s }}"
    ),
    "doubling with names of arguments": (
        "{% set ns = namespace(s=1) %}{% macro f() %}{% set ns.s = kwargs %}{% endmacro %}"
        "{% for i in range(60) %}{{ f(a=ns.s, b=ns.s) }}{% endfor %}{{ ns.s }}"
    ),
    "doubling with blocks": (
        "{% set ns = namespace(s='ab') %}{% for i in range(60) %}"
        "{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}{% endfor %}"
    ),
    "nesting": (
        "{% set ns = namespace(s=1) %}{% for i in range(99) %}{% set ns.s = [ns.s] %}{% endfor %}"
    ),
    "text in loops": "{% for i in range(99999) %}" + "a" * 1000 + "{% endfor %}",
    "text in macros": (
        "{% macro f() %}{% for i in range(9999) %}" + "a" * 1000 + "{% endfor %}{% endmacro %}"
        "{% for i in range(9999) %}{% set x = f() %}{% endfor %}"
    ),
    "values in loops": "{% set s = 'a' * 1000 %}{% for i in range(99999) %}{{ s }}{% endfor %}",
}


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_template_that_runs_for_ever_raises(source):
    with pytest.raises(DataError, match="some.jinja, line 1: the chat template failed"):
        rendered(source)


@pytest.mark.parametrize("source", GROWING.values(), ids=GROWING)
def test_template_that_grows_raises(source):
    with pytest.raises(DataError, match=r"some.jinja, line \d+: the chat template failed"):
        rendered(source)


@pytest.mark.parametrize(
    "case",
    [
        "squares",
        "doubling with +",
        "doubling with replace",
        "replace",
        "doubling with blocks",
        "replace with much more",
        "text in loops",
        "values in loops",
        "doubling tuples",
        "batch",
        "indent",
    ],
)
def test_template_that_grows_stays_in_bounded_memory(case):
    tracemalloc.start()
    try:
        with pytest.raises(DataError):
            rendered(GROWING[case])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    # Of the largest value there may be several at a time, of four bytes a character.
    assert peak < 40 * LARGEST


def test_namespaces_in_namespaces_are_not_written_out():
    text = rendered(repeat("1", "namespace(a=ns.s, b=ns.s)") + "{{ ns.s }}")

    assert text == "<Namespace>"


def test_namespace_that_holds_itself_renders():
    assert rendered("{% set ns = namespace() %}{% set ns.a = ns %}{{ ns.a == ns }}") == "True"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("\n{% if a", "some.jinja, line 2: unexpected end of template"),
        ("\n\n{{ a|nosuch }}", "some.jinja, line 3: No filter named 'nosuch'"),
        ("{{ 1|random }}", "line 1: No filter named 'random'"),
        ("{% for %}", "some.jinja, line 1: "),
        ("{{ " + "(" * 400 + ")" * 400 + " }}", "not a chat template: RecursionError"),
        ("a" * (2**17 + 1), "has 131073 characters, more than 131072"),
    ],
)
def test_compile_bad_source_names_file_and_line(source, message):
    with pytest.raises(DataError, match=message):
        compile_template(source, "some.jinja")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("\n\n{{ nothing.at.all }}", "line 3: the chat template failed: 'nothing' is undefined"),
        ("{{ 1 + 'a' }}", "line 1: the chat template failed: TypeError"),
        ("\n{{ raise_exception('no tools') }}", "line 2: the chat template failed: no tools"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{% macro f() %}\n{{ x.y }}{% endmacro %}{{ f() }}", "line 2: .*'x' is undefined"),
    ],
)
def test_render_failure_names_file_line_and_cause(source, message):
    with pytest.raises(DataError, match=message):
        rendered(source)


def test_render_failure_with_a_long_message_shows_its_beginning():
    with pytest.raises(DataError) as caught:
        rendered("{{ raise_exception('a' * 1000000) }}")

    assert 500 < len(str(caught.value)) < 600


def test_render_long_conversation_fits_the_budget():
    messages = [{"role": "user", "content": "word " * 200, "n": i} for i in range(3000)]
    source = (
        "{% for m in messages %}{% for n in messages[:20] %}{% if m.role == n.role %}"
        "{% endif %}{% endfor %}{{ m.content.strip().replace('w', 'W') | trim }}{% endfor %}"
    )

    text = rendered(source, messages=messages)

    assert text == ("Word " * 200).strip() * 3000


def test_render_large_text_fits_the_budget():
    content = "<think>" + "x" * 5_000_000 + "</think>answer"
    source = "{{ messages[0].content.split('</think>')[-1] ~ (messages[0]|tojson|length) }}"

    text = rendered(source, messages=[{"role": "user", "content": content}])

    assert text.startswith("answer5000")


def test_render_in_threads_does_not_share_a_budget():
    heavy = "{% for i in range(60000) %}{% set x = i + 1 %}{% endfor %}ok"
    found = []
    threads = [threading.Thread(target=lambda: found.append(rendered(heavy))) for _ in range(4)]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert found == ["ok"] * 4


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ ', '.join(['a', 'b']|map('upper')) }}", "A, B"),
        ("{{ ', '.join({'a': 1, 'b': 2}) }}{{ '-'.join({'a': 1, 'b': 2}.keys()) }}", "a, ba-b"),
        (
            "{{ '-'.join('abc') }}{{ '{:>4}|{}'.format(1, 'x') }}{{ '%05.2f' % 3.14159 }}",
            "a-b-c   1|x03.14",
        ),
        ("{{ '%(a)s' % {'a': 'é'} }}{{ 7 // 2 }}{{ 2 ** 3 }}{{ -1 }}{{ 1 < 2 < 3 }}", "é38-1True"),
        ("{% for a in [1, 2, 3] if a != 2 %}{{ a }}{{ loop.length }}{% endfor %}", "1232"),
        ("{% for a in [1, 2, 3] %}{% if a == 2 %}{% break %}{% endif %}{{ a }}{% endfor %}", "1"),
        ("{% for a in [[1], [2]] recursive %}{{ a }}{% endfor %}", "[1][2]"),
        (
            "{{ range(5)|batch(2)|list }}{{ [3, 1]|sort }}{{ [1, 2]|sum }}",
            "[[0, 1], [2, 3], [4]][1, 3]3",
        ),
        ("{{ 'a b'|title|replace('A', 'x')|indent(2, true) }}{{ ' a '|trim ~ 1 }}", "  x Ba1"),
        ("{{ messages[0].get('x', 'y') }}{{ messages[0].items()|list|first|last }}", "yuser"),
        ("{% call(x) f() %}{{ x }}{% endcall %}", "2"),
        ("{{ f2(1, *[2], **{'c': 3}) }}", "123"),
        ("{% filter upper %}a{% set x %}b{% endset %}{{ x }}{% endfilter %}", "AB"),
        ("{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.current }}", "aba"),
        ("{{ '<b>'|e }}{{ ('<i>'|safe) + '<' }}", "&lt;b&gt;<i>&lt;"),
        (
            "{{ (1.5)|round }}{{ 'x'|int(7) }}{{ '3'|float }}{{ none|default('d', true) }}",
            "2.073.0d",
        ),
    ],
)
def test_render_ordinary_templates_work_as_in_jinja(source, text):
    macros = (
        "{% macro f() %}{{ caller(2) }}{% endmacro %}"
        "{% macro f2(a, b, c=0) %}{{ a }}{{ b }}{{ c }}{% endmacro %}"
    )
    plain = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])

    assert rendered(macros + source) == text
    assert plain.from_string(macros + source).render(messages=MESSAGES) == text
