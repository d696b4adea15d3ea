#!/usr/bin/env python3
"""Writes tests/data/chat.txt, conversations as published chat templates write them, and prints their hashes.

    tests/make_chat_goldens.py                       needs jinja2, set up as transformers does it
    tests/make_chat_goldens.py --compare NAME FILE   whether FILE, a template, writes what NAME does, and its hash

The templates are those that models are published with; their texts, and no code, are what is compared. Records end
with 0x1e: template's name, conversation, whether an answer is asked for, the text.
"""

import os
import sys

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

ALTERNATE = (
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must "
    "alternate user/assistant/user/assistant/...') }}{% endif %}"
)
CHATML = (
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
DEFAULT = (
    "{%% if loop.first and messages[0]['role'] != 'system' %%}{{ '<|im_start|>system\n%s<|im_end|>\n' }}{%% endif %%}"
)
GEMMA = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}"
    + ALTERNATE
    + "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}"
    "{% endif %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
PHI3 = (
    "{%% for message in messages %%}{%% if message['role'] == 'system'%s %%}{{'<|system|>\n' + message['content'] + "
    "'<|end|>\n'}}{%% elif message['role'] == 'user' %%}{{'<|user|>\n' + message['content'] + '<|end|>\n'}}"
    "{%% elif message['role'] == 'assistant' %%}{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}{%% endif %%}"
    "{%% endfor %%}{%% if add_generation_prompt %%}{{ '<|assistant|>\n' }}{%% else %%}{{ eos_token }}{%% endif %%}"
)
MISTRAL_V1 = (
    "{{ bos_token }}{% for message in messages %}"
    + ALTERNATE
    + "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = "
    "messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}"
    "{% for message in loop_messages %}"
    + ALTERNATE
    + "{% if loop.index0 == 0 and system_message != false %}{% set content = '<<SYS>>\\n' + system_message + "
    "'\\n<</SYS>>\\n\\n' + message['content'] %}{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
    "message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
PHI3_FIRST = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') %}{{'<|user|>' + '\n' + "
    "message['content'] + '<|end|>' + '\n' + '<|assistant|>' + '\n'}}{% elif (message['role'] == 'assistant') %}"
    "{{message['content'] + '<|end|>' + '\n'}}{% endif %}{% endfor %}"
)
# Forms of our own, of what longer templates (tools, images) write for plain conversations.
LLAMA31_PLAIN = (
    "{% set given = messages[0]['role'] == 'system' %}{{ bos_token }}<|start_header_id|>system<|end_header_id|>\n\n"
    "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
    "{{ messages[0]['content'] | trim if given else '' }}<|eot_id|>{% for message in messages %}"
    "{% if not (given and loop.first) %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>{{ '\n\n' }}"
    "{{ message['content'] | trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>{{ '\n\n' }}{% endif %}"
)
GEMMA3_PLAIN = (
    "{% set given = messages[0]['role'] == 'system' %}{{ bos_token }}{% for message in (messages[1:] if given "
    "else messages) %}<start_of_turn>{{ 'model' if message['role'] == 'assistant' else 'user' }}{{ '\n' }}"
    "{{ messages[0]['content'] + '\n\n' if given and loop.first else '' }}{{ message['content'] | trim }}"
    "<end_of_turn>{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<start_of_turn>model{{ '\n' }}{% endif %}"
)
MISTRAL_PLAIN = (
    "{%% set given = messages[0]['role'] == 'system' %%}{{ bos_token }}{%% for message in (messages[1:] if given "
    "else messages) %%}{%% if message['role'] == 'user' %%}[INST]%s{{ messages[0]['content'] + "
    "'\n\n' if given and loop.last "
    "else '' }}{{ message['content'] }}[/INST]{%% else %%}%s{{ eos_token }}{%% endif %%}{%% endfor %%}"
)
MISTRAL_V7 = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}[INST] {{ message['content'] }}"
    "[/INST]{% elif message['role'] == 'system' %}[SYSTEM_PROMPT] {{ message['content'] }}[/SYSTEM_PROMPT]"
    "{% else %} {{ message['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)

# name, BOS, EOS, template, published (its hash is in the table), what it can write
SYSTEM, AGAIN = 1, 2  # a system message; the same role twice
PUBLISHED = [
    ("chatml", "", "", "{% for message in messages %}" + CHATML, SYSTEM | AGAIN),
    (
        "qwen2",
        "",
        "",
        "{% for message in messages %}" + DEFAULT % "You are a helpful assistant." + CHATML,
        SYSTEM | AGAIN,
    ),
    ("llama2", "<s>", "</s>", LLAMA2, SYSTEM),
    ("llama3", "<|begin_of_text|>", "", LLAMA3, SYSTEM | AGAIN),
    ("mistral-v1", "<s>", "</s>", MISTRAL_V1, 0),
    ("gemma", "<bos>", "", "{{ bos_token }}" + GEMMA, 0),
    ("phi3", "<s>", "<|endoftext|>", PHI3 % "", SYSTEM | AGAIN),
    ("phi3.5", "<s>", "<|endoftext|>", PHI3 % " and message['content']", SYSTEM | AGAIN),
    ("phi3-first", "<s>", "<|endoftext|>", PHI3_FIRST, AGAIN),
]
PLAIN = [
    (
        "qwen2.5",
        "",
        "",
        "{% for message in messages %}"
        + DEFAULT % "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
        + CHATML,
        SYSTEM | AGAIN,
    ),
    ("llama3.1", "<|begin_of_text|>", "", LLAMA31_PLAIN, SYSTEM | AGAIN),
    ("mistral-v3", "<s>", "</s>", MISTRAL_PLAIN % (" ", " {{ message['content'] | trim }}"), SYSTEM),
    ("mistral-v3-tekken", "<s>", "</s>", MISTRAL_PLAIN % ("", "{{ message['content'] }}"), SYSTEM),
    ("mistral-v7", "<s>", "</s>", MISTRAL_V7, SYSTEM),
    ("gemma3", "<bos>", "", GEMMA3_PLAIN, SYSTEM),
]

CONVERSATIONS = [  # of roles and texts; the C test has the same
    [("user", "Hello, who are you?")],
    [("system", "Be brief."), ("user", "Hi")],
    [("user", "One"), ("assistant", "Two"), ("user", "Three")],
    [
        ("system", "  Talk\nlike a pirate. \n"),
        ("user", " \tAhoy! "),
        ("assistant", "  Arr \n"),
        ("user", "\u00a0Bye\x1d "),
    ],
    [("user", ""), ("assistant", ""), ("user", "again")],
    [("system", ""), ("user", "x")],
    [("user", "a"), ("user", "b"), ("assistant", "c"), ("assistant", "d"), ("user", "e")],
    [("user", "\u4f60\u597d \U0001f600"), ("assistant", "\u00e9t\u00e9")],
]


def fail(message):
    raise jinja2.TemplateError(message)


def render(template, bos, eos, messages, answer):
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = fail
    messages = [{"role": role, "content": text} for role, text in messages]
    return environment.from_string(template).render(
        messages=messages, bos_token=bos, eos_token=eos, add_generation_prompt=answer
    )


def fits(messages, can):
    roles = [role for role, _ in messages]
    again = any(a == b for a, b in zip(roles, roles[1:]))
    return (can & SYSTEM or roles[0] != "system") and (can & AGAIN or not again)


def fnv(data):
    h = 0xCBF29CE484222325
    for byte in data:
        h = (h ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return h


def variants(template):
    """As it is, with line feeds spelled the other way, and without the BOS that llama.cpp's files leave to it."""
    for text in {template: 0, template.replace("\n", "\\n"): 0, template.replace("\\n", "\n"): 0}:
        yield text


def goldens():
    for name, bos, eos, template, can in PUBLISHED + PLAIN:
        for number, messages in enumerate(CONVERSATIONS):
            for answer in True, False:
                late = messages[0][0] == "system" and messages[-1][0] == "assistant"
                if fits(messages, can) and not late:
                    yield f"{name}\x1e{number}\x1e{int(answer)}\x1e{render(template, bos, eos, messages, answer)}\x1e"


def compare(name, path):
    """Whether the template in a file writes what the one of this name does; prints its line of the table."""
    with open(path, encoding="utf-8", newline="") as f:
        template = f.read().removesuffix("\n")
    _, bos, eos, ours, can = next(row for row in PUBLISHED + PLAIN if row[0] == name)
    for messages in CONVERSATIONS:
        late = messages[0][0] == "system" and messages[-1][0] == "assistant"
        for answer in True, False:
            if fits(messages, can) and not late:
                assert render(template, bos, eos, messages, answer) == render(ours, bos, eos, messages, answer)
    print(f'  {{{len(template.encode())}, UINT64_C(0x{fnv(template.encode()):016x}), "{name}"}},')


def main():
    if len(sys.argv) == 4 and sys.argv[1] == "--compare":
        return compare(*sys.argv[2:])
    here = os.path.dirname(os.path.abspath(__file__))
    with open(os.path.join(here, "data", "chat.txt"), "w", encoding="utf-8", newline="") as f:
        f.write("".join(goldens()))
    with open(os.path.join(here, "data", "chat-templates.txt"), "w", encoding="utf-8", newline="") as f:
        for name, _, _, template, _ in PUBLISHED:
            for text in variants(template):
                f.write(f"{name}\x1e{text}\x1e")
                print(f'  {{{len(text.encode())}, UINT64_C(0x{fnv(text.encode()):016x}), "{name}"}},')
    return 0


if __name__ == "__main__":
    sys.exit(main())
