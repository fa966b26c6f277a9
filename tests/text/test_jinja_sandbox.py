"""Chat templates that try to read Python internals, run long or use much memory fail quickly with an error."""

import time

import pytest

from regard.text.chat import ChatError, render

HELLO = [{"role": "user", "content": "hi"}]
ATTACKS = [
    "{{ ''.__class__.__mro__ }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='x') }}",
    "{{ messages[0].content.x.y }}",
    "{% include '/etc/passwd' %}",
    "{% for",
    "{{ 1 / 0 }}",
    "{{ raise_exception('no') }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% set r = range(99999) %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}",
    "{% set r = range(99999) %}{% for i in r %}{% for j in r %}xxxxxxxxxx{% endfor %}{% endfor %}",
    "{{ range(10 ** 9) }}",
    "{{ 'a' * 10 ** 9 }}",
    "{{ 3999999 * 'a' * 3999999 }}",
    "{{ [0] * 3000000 * 3000000 }}",
    "{{ 9 ** 9 ** 9 }}",
    "{{ 2.5 ** 99999 }}",
    "{% set ns = namespace(s='a') %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "{% set ns = namespace(s='a') %}{% for i in range(40) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% set s = 'a' * 1000000 %}{{ s.replace('a', s) }}",
    "{% set s = 'a' * 1000000 %}{{ s | replace('a', s) }}",
    "{% set s = 'a' * 1000000 %}{{ s | join(s) }}",
    "{{ 'a'.center(999999999) }}",
    "{{ 'a' | center(999999999) }}",
    "{{ '%999999999d' | format(1) }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '{:999999999d}'.format(1) }}",
    "{{ '{x:999999999d}'.format_map({'x': 1}) }}",
    "{{ lipsum(n=100000) }}",
    "{{ range(10000) | join('x' * 40000) }}",
    "{{ range(10000) | map('string') | join('x' * 40000) }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "{% set n = namespace(x=1) %}{% for i in range(40) %}{% set n.x = {'a': n.x, 'b': n.x} %}{% endfor %}{{ n.x }}",
    "{% set n = namespace(x=1) %}{% for i in range(40) %}{% set n.x = namespace(a=n.x, b=n.x) %}{% endfor %}{{ n.x }}",
    "{% set s = 'a' * 3000000 %}{{ s ~ s }}",
    "{% set n = namespace(x=range(9999) | list) %}{% for i in range(900) %}{% set n.x = [n.x] %}{% endfor %}"
    "{{ n.x | tojson(indent=16) }}",
    "{{ [1, 2] | tojson(indent=999999999) }}",
    "{{ range(9999) | list | tojson(separators=('x' * 40000, ':')) }}",
    "{% for i in [1] %}" * 25 + "{% endfor %}" * 25,
]


@pytest.mark.parametrize("template", ATTACKS)
def test_an_attack_fails_within_the_time_limit(template, monkeypatch):
    monkeypatch.setattr("regard.text.jinja_sandbox.TIME_LIMIT", 0.2)
    start = time.thread_time()
    with pytest.raises(ChatError, match="chat template failed"):
        render(template, HELLO)
    assert time.thread_time() - start < 2
    assert HELLO == [{"role": "user", "content": "hi"}]
