#!/usr/bin/env python3
"""Renders chat templates with transformers for template_test.cpp: fixtures/cases.json.

The templates are written for this test. Each uses the constructs and markers of the family that it is named after.
Needs transformers 5 and jinja2: python make_fixtures.py
"""
import json
import pathlib
from datetime import datetime

from transformers.utils import chat_template_utils
from transformers.utils.chat_template_utils import render_jinja_template

OUT = pathlib.Path(__file__).parent / "fixtures"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

TEMPLATES = {
    # A loop over blocks that trim their lines.
    "chatml": """{% for m in messages %}
{{ '<|im_start|>' ~ m['role'] ~ '\\n' ~ m['content'] ~ '<|im_end|>' ~ '\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
""",
    # Nested ifs, an end-of-text token after each turn, the prompt within the loop.
    "zephyr": """{% for m in messages %}
{% if m['role'] in ['user', 'system'] %}
{{ '<|' + m['role'] + '|>\\n' + m['content'] + eos_token }}
{% elif m['role'] == 'assistant' %}
{{ '<|assistant|>\\n'  + m['content'] + eos_token }}
{% endif %}
{% if add_generation_prompt and loop.last %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}""",
    # Slices of messages, alternation, the system text within the first message, strip().
    "llama2": """{% set system = '' %}{% set turns = messages %}{% if messages[0]['role'] == 'system' %}\
{% set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}{% set turns = messages[1:] %}{% endif %}\
{% for m in turns %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Roles must go user, assistant, user, ...') }}{% endif %}{% set text = m['content'].strip() %}\
{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + (system if loop.first else '') + text + ' [/INST]' }}\
{% else %}{{ ' '  + text + ' ' + eos_token }}{% endif %}{% endfor %}""",
    # Variables that may be undefined, dates, tools as indented JSON, reject and join, items, shadowing of a variable.
    "llama3": """{{- bos_token -}}
{%- if date_string is not defined %}
    {%- set date_string = strftime_now("%d %b %Y") if strftime_now is defined else "1 Jan 2000" %}
{%- endif %}
{%- set offered = custom_tools if custom_tools is defined else tools %}
{%- set with_user = tools_in_user_message if tools_in_user_message is defined else true %}

{#- Who may speak first? #}
{%- set system = "" %}
{%- if messages[0].role == "system" %}
    {%- set system = messages[0]["content"] | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if builtin_tools is defined %}
    {{- "Built in: " ~ builtin_tools | reject("equalto", "code_interpreter") | join(", ") ~ "\\n" }}
{%- endif %}
{{- "Today: " + date_string + "\\n\\n" + system }}
{%- macro listing(tools) %}
    {%- for tool in tools %}{{ tool | tojson(indent=4) }}{{ "\\n\\n" }}{% endfor %}
{%- endmacro %}
{%- if offered and not with_user %}
    {{- listing(offered) }}
{%- endif %}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role in ["tool", "ipython"] %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
    {%- elif "tool_calls" in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception("One call at a time") }}
        {%- endif %}
        {%- set f = message.tool_calls[0].function -%}
        {{ "<|start_header_id|>assistant<|end_header_id|>\\n\\n" -}}
        {%- if builtin_tools is defined and f.name in builtin_tools %}
            {{- "<|python_tag|>" ~ f.name ~ ".call(" }}
            {%- for key, value in f.arguments | items %}
                {{- key ~ '="' ~ value ~ '"' }}{{ "" if loop.last else ", " }}
            {%- endfor %}
            {{- ")" }}
        {%- else %}
            {{- '{"name": "' + f.name + '", "parameters": ' ~ f.arguments | tojson ~ "}" }}
        {%- endif %}
    {%- else %}
        {{- "<|start_header_id|>" + message.role + "<|end_header_id|>\\n\\n" }}
        {%- if loop.first and offered and with_user %}
            {{- listing(offered) }}
        {%- endif %}
        {{- message.content | trim }}
    {%- endif %}
    {{- "<|eot_id|>" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}
{%- endif %}
""",
    # selectattr, a counter in a namespace, comparison of dicts, a loop with a condition over a dict, JSON cut by a slice.
    "mistral": """{%- set turns = messages | rejectattr("role", "equalto", "system") | list %}
{%- set asked = turns | selectattr("role", "equalto", "user") | list %}
{%- set state = namespace(count=0) %}
{%- for m in turns %}
    {%- if m.role in ("user", "assistant") and not (m.tool_calls is defined and m.tool_calls is not none) %}
        {%- if (m["role"] == "user") != (state.count % 2 == 0) %}
            {{- raise_exception("Roles must go user, assistant, user, ...") }}
        {%- endif %}
        {%- set state.count = state.count + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for m in turns %}
    {%- if m["role"] == "user" %}
        {%- if tools is not none and m == asked[-1] %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {{- "{" }}
                {%- for key, value in tool.function.items() if key != "return" %}
                    {{- '"' ~ key ~ '": ' ~ ('"' ~ value ~ '"' if value is string else value | tojson) }}
                    {%- if not loop.last %}{{ ", " }}{% endif %}
                {%- endfor %}
                {{- "}" ~ ("]" if loop.last else ", ") }}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {{- "[INST] " }}
        {%- if loop.last and messages[0].role == "system" %}
            {{- messages[0].content + "\\n\\n" }}
        {%- endif %}
        {{- m["content"] + "[/INST]" }}
    {%- elif m.tool_calls is defined and m.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for call in m.tool_calls %}
            {%- if call.id is not defined or call.id | length != 9 %}
                {{- raise_exception("Ids of calls have 9 characters") }}
            {%- endif %}
            {%- set json = call.function | tojson %}
            {{- json[:-1] ~ ', "id": "' ~ call.id ~ '"}' ~ (", " if not loop.last else "]" + eos_token) }}
        {%- endfor %}
    {%- elif m["role"] == "tool" %}
        {%- set content = m.content.content if m.content is defined and m.content.content is defined else m.content %}
        {{- '[TOOL_RESULTS] {"content": ' + content | string + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- " " + m["content"] | trim + eos_token }}
    {%- endif %}
{%- endfor %}
""",
    # A backward slice, namespaces, split and strip of reasoning, neighbours by index, `is false`.
    "qwen3": """{%- if tools or messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' ~ (messages[0].content if messages[0].role == 'system' else '') }}
    {%- if tools %}
        {{- '\\n\\n<tools>' }}
        {%- for tool in tools %}{{ '\\n' ~ tool | tojson }}{% endfor %}
        {{- '\\n</tools>' }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set found = namespace(asked=none) %}
{%- for m in messages[::-1] %}
    {%- if found.asked is none and m.role == 'user' and m.content is string and not (m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) %}
        {%- set found.asked = messages | length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- set text = m.content if m.content is string else '' %}
    {%- set thoughts = '' %}
    {%- if m.role == 'assistant' %}
        {%- if m.reasoning_content is string %}
            {%- set thoughts = m.reasoning_content %}
        {%- elif '</think>' in text %}
            {%- set thoughts = text.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set text = text.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > (found.asked if found.asked is not none else -1) and (loop.last or thoughts) %}
            {{- '<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' + text.lstrip('\\n') }}
        {%- else %}
            {{- text }}
        {%- endif %}
        {%- for call in m.tool_calls or [] %}
            {%- if text or not loop.first %}{{ '\\n' }}{% endif %}
            {%- set f = call.function if call.function else call %}
            {{- '<tool_call>\\n{"name": "' ~ f.name ~ '", "arguments": ' }}
            {{- f.arguments if f.arguments is string else f.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' ~ text ~ '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- elif m.role == 'user' or not loop.first %}
        {{- '<|im_start|>' + m.role + '\\n' + text + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
""",
    # Marks on both sides of every block, parts of content, a renamed role, inline ifs.
    "gemma": """{{ bos_token }}
{%- set turns = messages -%}
{%- set before = '' -%}
{%- if messages[0]['role'] == 'system' -%}
    {%- set turns = messages[1:] -%}
    {%- set system = messages[0]['content'] -%}
    {%- set before = (system if system is string else system[0]['text']) + '\\n\\n' -%}
{%- endif -%}
{%- for m in turns -%}
    {%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Roles must go user, assistant, user, ...") }}
    {%- endif -%}
    {{ '<start_of_turn>' ~ ('model' if m['role'] == 'assistant' else m['role']) ~ '\\n' }}
    {%- if loop.first -%} {{ before }} {%- endif -%}
    {%- if m['content'] is string -%}
        {{ m['content'] | trim }}
    {%- elif m['content'] is iterable -%}
        {%- for part in m['content'] -%}
            {%- if part['type'] == 'text' -%}
                {{ part['text'] | trim }}
            {%- else -%}
                {{ '<start_of_' ~ part['type'] ~ '>' }}
            {%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Content must be text or parts") }}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model\\n'}}
{%- endif -%}
""",
    # Line ends within strings, an end of text without a prompt.
    "phi3": """{% for m in messages %}{% if m['role'] != 'system' or m['content'] %}{{ '<|' + m['role'] + '|>
' + m['content'] + '<|end|>
'}}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>
' }}{% else %}{{ eos_token }}{% endif %}""",
    # {% generation %}, chained replace(), variables set by others or not at all, concatenation with ~, string of a dict.
    "smollm3": """{# The mode comes from the caller or the system message. #}
{%- set mode = "/no_think" if enable_thinking is defined and not enable_thinking else "/think" -%}
{{- "<|im_start|>system\\n" -}}
{%- if messages[0].role == "system" -%}
  {%- set system = messages[0].content -%}
  {%- if "/no_think" in system -%}
    {%- set mode = "/no_think" -%}
  {%- endif -%}
  {%- set wishes = system.replace("/no_think", "").replace("/think", "").rstrip() -%}
{%- endif -%}
{{- "Date: " ~ strftime_now("%d %B %Y") ~ "\\n" ~ "Mode: " + mode + "\\n\\n" -}}
{%- if wishes -%}
  {{- wishes + "\\n\\n" -}}
{%- endif -%}
{%- if xml_tools or python_tools or tools -%}
  {%- set list = namespace(text="<tools>\\n") -%}
  {%- for tool in (tools or xml_tools)[:] -%}
    {%- set list.text = list.text ~ (tool | string) ~ "\\n" -%}
  {%- endfor -%}
  {{- list.text + "</tools>" -}}
{%- endif -%}
{{- "<|im_end|>\\n" -}}
{%- set nothing = "<think>\\n\\n</think>\\n" if mode == "/no_think" else "" -%}
{%- for m in messages -%}
    {%- set text = m.content if m.content is string else "" -%}
    {%- if m.role == "assistant" -%}
        {% generation %}
        {{ "<|im_start|>assistant\\n" + nothing + text.lstrip("\\n") + "<|im_end|>\\n" }}
        {%- if false -%}{%- endif -%}
        {% endgeneration %}
    {%- elif m.role != "system" -%}
        {{ "<|im_start|>" + "user\\n" + text + "<|im_end|>\\n" }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ "<|im_start|>assistant\\n" + nothing }}
{%- endif -%}
""",
    # Another text for the last message, line ends within strings and after blocks.
    "olmo2": """{{ bos_token }}{% for m in messages %}
{% if m['role'] == 'assistant' %}
{% if loop.last %}
{{ '<|assistant|>
'  + m['content'] + eos_token }}
{% else %}
{{ '<|assistant|>
'  + m['content'] + eos_token + '
' }}
{% endif %}
{% else %}
{{ '<|' + m['role'] + '|>
' + m['content'] + '
' }}
{% endif %}
{% if add_generation_prompt and loop.last %}
{{ '<|assistant|>
' }}
{% endif %}
{% endfor %}""",
    # Methods of strings.
    "openchat": "{{ bos_token }}{% for m in messages %}{{ 'GPT4 ' + m['role'].title() + ': ' + m['content'] + '<|end_of_turn|>'}}"
                "{% endfor %}{% if add_generation_prompt %}{{ 'GPT4 Assistant:' }}{% endif %}",
    "macros": """{%- macro type_of(spec, top=true) -%}
  {%- if spec.type == "array" -%}
    {{- type_of(spec['items'], false) -}}[]
  {%- elif spec.enum is defined -%}
    {{ '"' ~ spec.enum | join('" | "') ~ '"' }}
  {%- elif spec.type == "object" -%}
    {%- set out -%}
      {%- for name, p in spec.properties.items() -%}
        {{ name ~ ('' if name in (spec.required or []) else '?') ~ ': ' ~ type_of(p, top=false) }}{{ ', ' if not loop.last }}
      {%- endfor -%}
    {%- endset -%}
    {{ '{' ~ out ~ '}' }}
  {%- else -%}
    {{ spec.type | default('any') }}
  {%- endif -%}
{%- endmacro -%}
{% for tool in tools or [] %}
{{ loop.index ~ '/' ~ loop.length }} {{ tool.function.name }}({{ type_of(tool.function.parameters) }})
{% else %}
no tools
{% endfor %}
{%+ if true +%}
kept
  {% endif -%}

  stripped   {%- for m in messages if m.role != 'system' %}
{% if loop.index0 == 3 %}{% break %}{% endif %}
{% if m.role == 'tool' %}{% continue %}{% endif %}
[{{ loop.revindex }}:{{ loop.previtem.role if loop.previtem is defined else '-' }}>{{ m.role | upper }}>{{ (loop.nextitem | default({'role': 'end'})).role }}]
{%- endfor %}
{{ messages | map(attribute='role') | unique | join(',') }}|{{ messages | rejectattr('role', 'in', ['user']) | map(attribute='role') | list }}
{{ messages[0] }}{{ [1, 2.5, 1e3 if false else 1000000.0, none, true, 'a\\'b', "q\\"", {'k': 'ü\\n'}] }}
{{ {'b': [1, {}], 'a': 'ü😀\\x7f\\u2028"\\\\\\t', 'c': [], 'd': 1.5e-7 if false else 0.5} | tojson }}
{{ {'b': [1], 'a': 'ü😀'} | tojson(indent=2, sort_keys=true, ensure_ascii=true) }}
{{ [7 // 2, -7 // 2, -7 % 3, 7 / 2, 2 ** 10, 1 + true, 'ab' * 2, 'x' < 'y', 1 < 2 <= 2] }}
{{ ['héllo wörld'[1:4], 'héllo'[::-1], 'héllo'[-2], [1, 2, 3, 4][::2], 'abc'[5] is defined, (1, 2)[1]] }}
{{ [' a  b '.split(), 'a,b,,c'.split(','), 'a,b,c'.split(',', 1), 'a,b,c'.rsplit(',', 1), 'xxaxx'.strip('x')] }}
{{ ['abc'.find('c'), 'aXbX'.replace('X', '-', 1), 'abc' is string, undefined_name is defined, 'a' in 'abc', 'z' not in ['a']] }}
{{ undefined_name | default('none there') ~ undefined_name ~ ('' | default('empty', true)) }}{{ not undefined_name }}
{{ ['b', 'A', 'c'] | sort | join }}{{ {'z': 1, 'Y': 2} | dictsort | map('join', '=') | list }}{{ [3, 1] | sort(reverse=true) }}{{ 'Ab' | lower | capitalize }}
{{ 'l1\\nl2\\n\\nl3' | indent(2) }}{{ 'x' | indent(3, true) }}{{ '3' | int + 1 }}{{ '2.5' | float }}{{ -3 | abs }}{{ 'a-b' | replace('-', '+') }}
{{ 5 is odd and 4 is even and 9 is divisibleby 3 and 3 is not none and [] is sequence and {} is mapping and 1 is number }}
{{ messages[-1].get('nothing', 'fallback') }}{{ messages[0].keys() | list }}{{ range(1, 10, 3) | list }}{{ dict(a=1).a }}""",
}

TOOLS = [{"type": "function", "function": {
    "name": "weather", "description": "The weather \"now\"", "parameters": {
        "type": "object", "properties": {"city": {"type": "string", "description": "Stadt, größer"},
                                         "unit": {"type": "string", "enum": ["C", "F"]},
                                         "days": {"type": "array", "items": {"type": "integer"}}},
        "required": ["city"]}, "return": {"type": "number"}}}]
HELLO = [{"role": "user", "content": " Hello,\n world! "}]
ANSWERED = HELLO + [{"role": "assistant", "content": "Hi. "}]
LONGER = [{"role": "system", "content": "Be brief. /no_think"}] + ANSWERED + [
    {"role": "user", "content": "größe 😀 <|im_end|>?"}, {"role": "assistant", "content": "<think>\nhm\n</think>\n\n42 \n"}]
CALL = {"role": "assistant", "content": "", "tool_calls": [
    {"type": "function", "id": "abcdefghi", "function": {"name": "weather", "arguments": {"city": "Köln", "days": [1, 2], "x": 0.1}}}]}
WITH_TOOLS = HELLO + [CALL, {"role": "tool", "tool_call_id": "abcdefghi", "content": "12.5"},
                      {"role": "assistant", "content": "12.5 degrees", "reasoning_content": "easy"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": " see "}, {"type": "image"}]}]

CONVERSATIONS = {
    "hello": {"messages": HELLO}, "prompt": {"messages": HELLO, "add_generation_prompt": True},
    "answered": {"messages": ANSWERED}, "longer": {"messages": LONGER},
    "continued": {"messages": LONGER[:-1], "add_generation_prompt": True},
    "no thinking": {"messages": HELLO, "add_generation_prompt": True, "enable_thinking": False},
    "tools": {"messages": WITH_TOOLS, "tools": TOOLS, "add_generation_prompt": True},
    "system tools": {"messages": LONGER[:2], "tools": TOOLS, "tools_in_user_message": False},
    "builtin": {"messages": HELLO + [dict(CALL, tool_calls=[{"function": {"name": "search", "arguments": {"query": "a", "n": "2"}}}])],
                "builtin_tools": ["search", "code_interpreter"], "date_string": "1 Jan 2000"},
    "out of order": {"messages": [ANSWERED[1], HELLO[0]]}, "parts": {"messages": PARTS},
}


class Clock(datetime):
    @classmethod
    def now(cls):
        return cls(2024, 7, 26)


def main():
    chat_template_utils.datetime = Clock
    cases = []
    for name, template in TEMPLATES.items():
        for title, given in CONVERSATIONS.items():
            variables = {**TOKENS, **given}
            case = {"template": name, "title": title, "variables": variables}
            given = {"tools": None, "documents": None, "add_generation_prompt": False, **variables}
            messages = given.pop("messages")
            marked = "{% generation %}" in template
            try:
                texts, spans = render_jinja_template([messages], chat_template=template, return_assistant_tokens_mask=marked, **given)
                case["text"] = texts[0]
                if marked:
                    case["generated"] = spans[0]
            except Exception as error:
                case["error"] = str(error)
            cases.append(case)
    OUT.mkdir(exist_ok=True)
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    (OUT / "cases.json").write_text(f'{{"templates": {json.dumps(TEMPLATES, ensure_ascii=False)},\n"cases": [\n{lines}\n]}}\n')
    print(f"{len(cases)} cases, {sum('error' in c for c in cases)} with errors")
    for c in cases:
        if "error" in c:
            print(c["template"], c["title"], c["error"][:100])


if __name__ == "__main__":
    main()
