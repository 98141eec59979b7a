#!/usr/bin/env python3
"""Renders chat templates with transformers for template_test.cpp: fixtures/cases.json.

The templates are written for this test with the constructs of the published ones that they are named after.
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
    "chatml": """{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
""",
    "zephyr": """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}""",
    "llama2": """{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set system = messages[0]['content'] %}\
{% else %}{% set rest = messages %}{% set system = false %}{% endif %}{% for m in rest %}\
{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must go user, assistant, user, ...') }}{% endif %}\
{% if loop.index0 == 0 and system != false %}{% set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + m['content'] %}\
{% else %}{% set content = m['content'] %}{% endif %}\
{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}\
{% elif m['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}""",
    "llama3": """{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not tools_in_user_message is defined %}
    {%- set tools_in_user_message = true %}
{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}

{#- The first message may be for the system. #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if builtin_tools is defined or tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{%- if builtin_tools is defined %}
    {{- "Tools: " + builtin_tools | reject('equalto', 'code_interpreter') | join(", ") + "\\n\\n"}}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools is not none and not tools_in_user_message %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- if tools_in_user_message and not tools is none %}
    {%- if messages | length != 0 %}
        {%- set first_user_message = messages[0]['content']|trim %}
        {%- set messages = messages[1:] %}
    {%- else %}
        {{- raise_exception("Tools need a first user message") }}
    {%- endif %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\n' -}}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
    {{- first_user_message + "<|eot_id|>"}}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("One call at a time") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {%- if builtin_tools is defined and tool_call.name in builtin_tools %}
            {{- "<|python_tag|>" + tool_call.name + ".call(" }}
            {%- for arg_name, arg_val in tool_call.arguments | items %}
                {{- arg_name + '="' + arg_val + '"' }}
                {%- if not loop.last %}
                    {{- ", " }}
                {%- endif %}
            {%- endfor %}
            {{- ")" }}
        {%- else %}
            {{- '{"name": "' + tool_call.name + '", ' }}
            {{- '"parameters": ' }}
            {{- tool_call.arguments | tojson }}
            {{- "}" }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
""",
    "mistral": """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or message.role == "tool_results" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("After the optional system message, roles must alternate") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val|tojson }}
                    {%- endif %}
                    {%- if not loop.last %}
                        {{- ", " }}
                    {%- endif %}
                {%- endfor %}
                {{- "}}" }}
                {%- if not loop.last %}
                    {{- ", " }}
                {%- else %}
                    {{- "]" }}
                {%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}
            {{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id|length != 9 %}
                {{- raise_exception("Ids of calls have 9 characters") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {{- ", " if not loop.last else "]" + eos_token }}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- elif message["role"] == "tool_results" or message["role"] == "tool" %}
        {%- set content = message.content.content if message.content is defined and message.content.content is defined else message.content %}
        {{- '[TOOL_RESULTS] {"content": ' + content|string + ", " }}
        {{- '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception("Only user, assistant and tool roles") }}
    {%- endif %}
{%- endfor %}
""",
    "qwen3": """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}
                    {{- '\\n' }}
                {%- endif %}
                {%- if tool_call.function %}
                    {%- set tool_call = tool_call.function %}
                {%- endif %}
                {{- '<tool_call>\\n{"name": "' }}
                {{- tool_call.name }}
                {{- '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {{- content }}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
""",
    "gemma": """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}
                {{ '<start_of_image>' }}
            {%- elif item['type'] == 'text' -%}
                {{ item['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model\\n'}}
{%- endif -%}
""",
    "phi3": """{% for message in messages %}{% if message['role'] == 'system' and message['content'] %}{{'<|system|>
' + message['content'] + '<|end|>
'}}{% elif message['role'] == 'user' %}{{'<|user|>
' + message['content'] + '<|end|>
'}}{% elif message['role'] == 'assistant' %}{{'<|assistant|>
' + message['content'] + '<|end|>
'}}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>
' }}{% else %}{{ eos_token }}{% endif %}""",
    "smollm3": """{# Which mode? #}
{%- if enable_thinking is not defined -%}
{%- set enable_thinking = true -%}
{%- endif -%}
{%- if enable_thinking -%}
  {%- set reasoning_mode = "/think" -%}
{%- else -%}
  {%- set reasoning_mode = "/no_think" -%}
{%- endif -%}
{{- "<|im_start|>system\\n" -}}
{%- if messages[0].role == "system" -%}
  {%- set system_message = messages[0].content -%}
  {%- if "/no_think" in system_message -%}
    {%- set reasoning_mode = "/no_think" -%}
  {%- endif -%}
  {%- set custom_instructions = system_message.replace("/no_think", "").replace("/think", "").rstrip() -%}
{%- endif -%}
{%- set today = strftime_now("%d %B %Y") -%}
{{- "Date: " ~ today ~ "\\n" -}}
{{- "Mode: " + reasoning_mode + "\\n\\n" -}}
{%- if custom_instructions -%}
  {{- custom_instructions + "\\n\\n" -}}
{%- endif -%}
{%- if xml_tools or python_tools or tools -%}
  {{- "### Tools\\n\\n" -}}
  {%- set ns = namespace(xml_tool_string="List:\\n<tools>\\n") -%}
  {%- for tool in (tools or xml_tools)[:] -%}
    {%- set ns.xml_tool_string = ns.xml_tool_string ~ (tool | string) ~ "\\n" -%}
  {%- endfor -%}
  {{- ns.xml_tool_string + "</tools>" -}}
{%- endif -%}
{{- "<|im_end|>\\n" -}}
{%- for message in messages -%}
    {%- set content = message.content if message.content is string else "" -%}
    {%- if message.role == "user" -%}
        {{ "<|im_start|>" + message.role + "\\n" + content + "<|im_end|>\\n" }}
    {%- elif message.role == "assistant" -%}
        {% generation %}
        {%- if reasoning_mode == "/think" -%}
            {{ "<|im_start|>assistant\\n" + content.lstrip("\\n") + "<|im_end|>\\n" }}
        {%- else -%}
            {{ "<|im_start|>assistant\\n" + "<think>\\n\\n</think>\\n" + content.lstrip("\\n") + "<|im_end|>\\n" }}
        {%- endif -%}
        {% endgeneration %}
    {%- elif message.role == "tool" -%}
    {{ "<|im_start|>" + "user\\n" + content + "<|im_end|>\\n" }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {%- if reasoning_mode == "/think" -%}
        {{ "<|im_start|>assistant\\n" }}
    {%- else -%}
        {{ "<|im_start|>assistant\\n" + "<think>\\n\\n</think>\\n" }}
    {%- endif -%}
{%- endif -%}
""",
    "olmo2": """{{ bos_token }}{% for message in messages %}
{% if message['role'] == 'system' %}
{{ '<|system|>
' + message['content'] + '
' }}
{% elif message['role'] == 'user' %}
{{ '<|user|>
' + message['content'] + '
' }}
{% elif message['role'] == 'assistant' %}
{% if not loop.last %}
{{ '<|assistant|>
'  + message['content'] + eos_token + '
' }}
{% else %}
{{ '<|assistant|>
'  + message['content'] + eos_token }}
{% endif %}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>
' }}
{% endif %}
{% endfor %}""",
    "openchat": "{{ bos_token }}{% for message in messages %}{{ 'GPT4 Correct ' + message['role'].title() + ': ' + message['content'] + "
                "'<|end_of_turn|>'}}{% endfor %}{% if add_generation_prompt %}{{ 'GPT4 Correct Assistant:' }}{% endif %}",
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
    (OUT / "cases.json").write_text(json.dumps({"templates": TEMPLATES, "cases": cases}, ensure_ascii=False, indent=0) + "\n")
    print(f"{len(cases)} cases, {sum('error' in c for c in cases)} with errors")
    for c in cases:
        if "error" in c:
            print(c["template"], c["title"], c["error"][:100])


if __name__ == "__main__":
    main()
