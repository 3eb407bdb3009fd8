"""Chat templates in the manner of well-known models, with generation markers, and conversations for them."""
# ruff: noqa: E501 - a line break in a template may be one in its output

CHATML = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ message.content + '<|im_end|>' }}{% endif %}{{ '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# The end of the turn is not part of the generation, so that a span ends with text of the message.
BARE = """{% for message in messages %}{% if message['role'] == 'assistant' %}A: {% generation %}{{ message['content'] }}
{%- endgeneration %}{% else %}{{ message['role'][0] | upper }}: {{ message['content'] }}{% endif %}

{% endfor %}{% if add_generation_prompt %}A: {% endif %}"""

LLAMA_3 = """{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}{{- message['content'] | trim + '<|eot_id|>' }}{%- endgeneration %}
    {%- else %}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""

INST = """{% if messages[0]['role'] == 'system' %}{% set system = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}
{%- set turns = messages[1:] %}{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}
{%- for message in turns %}
{%- if message['role'] == 'user' %}
{{- bos_token + '[INST] ' + (system if loop.first else '') + message['content'] + ' [/INST]' }}
{%- elif message['role'] == 'assistant' %}{% generation %} {{ message['content'] + eos_token }}{% endgeneration %}
{%- else %}{{ raise_exception('only user and assistant turns are known') }}{% endif %}
{%- endfor %}"""

GEMMA = """{{ bos_token }}{% for message in messages %}{% set role = 'model' if message.role == 'assistant' else message.role %}
<start_of_turn>{{ role }}
{% if message.role == 'assistant' %}{% generation %}{{ message.content | trim }}<end_of_turn>
{% endgeneration %}{% else %}{{ message.content | trim }}<end_of_turn>
{% endif %}{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""

# Only the turns after the last question keep their reasoning; tools are listed first; a macro writes the turns.
REASONING = """{%- macro turn(message, keep) %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}
{%- if keep and message.reasoning_content %}{{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{% endif %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}{{- '\n<tool_call>\n' + call.function | tojson + '\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\n' }}
{%- endgeneration %}
{%- else %}{{- message.content + '<|im_end|>\n' }}{% endif %}
{%- endmacro %}
{%- if tools %}{{- '<|im_start|>system\nTools:' }}{% for tool in tools %}{{- '\n' + tool | tojson }}{% endfor %}{{- '<|im_end|>\n' }}{% endif %}
{%- set ns = namespace(last=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}{{- turn(message, loop.index0 > ns.last) }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""

# As above, without a macro: transformers finds generations in the output of a template alone.
TOOLS = """{%- if tools %}{{- '<|im_start|>system\nTools:' }}{% for tool in tools %}{{- '\n' + tool | tojson }}{% endfor %}{{- '<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\n' }}
{%- generation %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}{{- '\n<tool_call>\n' + call.function | tojson + '\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>' }}
{%- endgeneration %}{{- '\n' }}
{%- elif message.role == 'tool' %}{{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
{%- else %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}
{%- if loop.last and add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% break %}{% endif %}
{%- endfor %}"""

BY_NAME = {"chatml": CHATML, "bare": BARE, "llama_3": LLAMA_3, "inst": INST, "gemma": GEMMA, "tools": TOOLS}

SPECIAL_TOKENS = [
    *("<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]"),
]

CONVERSATION = [
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris. It has been so for a long time."},
    {"role": "user", "content": "And of Perú?"},
    {"role": "assistant", "content": "Lima"},
]

WITH_TOOLS = [
    {"role": "user", "content": "How warm is it in Lima?"},
    {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Lima", "unit": "°C"}}}],
    },
    {"role": "tool", "content": '{"degrees": 19.5}'},
    {"role": "assistant", "content": "It is 19.5 °C in Lima."},
]

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city, now & here <today>",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "unit": {"type": "string"}}},
    },
}
