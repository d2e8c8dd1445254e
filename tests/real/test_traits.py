"""What the real engine's rendering teaches of several shapes of chat templates."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.core.template import Traits
from proxy.traits import Served
from tests.real.conftest import EngineFactory, driver

pytestmark = pytest.mark.real

CHATML = """\
{%- for message in messages %}
{%- if loop.first and message.role != 'system' %}
{{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
# Like Qwen 3: refuses a later system message, forgets the thinking of finished turns.
THINKING = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\n<tool_call>\\n{"name": <name>, "arguments": <object>}\\n</tool_call>' }}
{{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'system' %}
{%- if not loop.first %}
{{- raise_exception('System message must be at the beginning.') }}
{%- endif %}
{%- elif message.role == 'user' %}
{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if message.reasoning_content and loop.index0 > ns.last %}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
{{- '\\n</tool_response><|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}
"""
# Like Llama 3.2: a date in the head, tools with the first user message.
DATED = """\
{%- if date_string is not defined %}
{%- if strftime_now is defined %}{%- set date_string = strftime_now('%d %b %Y') %}
{%- else %}{%- set date_string = '26 Jul 2024' %}{%- endif %}
{%- endif %}
{%- set system = '' %}
{%- if messages[0].role == 'system' %}
{%- set system = messages[0].content %}{%- set messages = messages[1:] %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools %}{{- 'Environment: ipython\\n' }}{%- endif %}
{{- 'Cutting Knowledge Date: December 2023\\nToday Date: ' + date_string + '\\n\\n' }}
{{- system + '<|eot_id|>' }}
{%- for message in messages %}
{%- if message.role == 'tool' or message.role == 'ipython' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content + '<|eot_id|>' }}
{%- elif message.tool_calls %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name }}
{{- '", "parameters": ' }}{{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{%- if tools and loop.first %}
{{- 'Given the following functions:\\n\\n' }}
{%- for tool in tools %}{{- tool | tojson }}{{- '\\n\\n' }}{%- endfor %}
{%- endif %}
{{- message.content + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
# Like Mistral 7B v0.3: strict alternation, tools and system text with the last user message.
ALTERNATING = """\
{%- set system = '' %}
{%- if messages[0].role == 'system' %}
{%- set system = messages[0].content %}{%- set messages = messages[1:] %}
{%- endif %}
{%- set ns = namespace(index=0, last=0) %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
{%- if (message.role == 'user') != (ns.index % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant') }}
{%- endif %}
{%- set ns.index = ns.index + 1 %}
{%- endif %}
{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools and loop.index0 == ns.last %}
{{- '[AVAILABLE_TOOLS] ' }}{{- tools | tojson }}{{- '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{%- if system and loop.index0 == ns.last %}
{{- '[INST] ' + system + '\\n\\n' + message.content + '[/INST]' }}
{%- else %}
{{- '[INST] ' + message.content + '[/INST]' }}
{%- endif %}
{%- elif message.tool_calls %}
{{- '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}
{{- '{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- ', "id": "' + call.id + '"}' }}
{%- endfor %}
{{- ']</s>' }}
{%- elif message.role == 'assistant' %}
{{- ' ' + message.content + '</s>' }}
{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS] {"content": ' }}{{- message.content | tojson }}{{- '}[/TOOL_RESULTS]' }}
{%- else %}
{{- raise_exception('Only user and assistant roles are supported') }}
{%- endif %}
{%- endfor %}
"""
# Like Cohere's and several others: the declarations first, then the system text; keeps thinking.
TOOLS_FIRST = """\
{%- if tools %}
{{- '<|im_start|>tools\\n' }}
{%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content %}
{{- '<think>' + message.reasoning_content + '</think>' }}
{%- endif %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- '}</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
# The template, and what must be told of it (everything else: the default of ``Traits``).
SHAPES: dict[str, tuple[str, Traits]] = {
    "chatml": (
        CHATML,
        Traits(
            mid_system=True,
            two_systems=True,
            renders_tools=False,
            keeps_reasoning=False,
            loop_reasoning=False,
        ),
    ),
    "thinking": (
        THINKING,
        Traits(
            mid_system=False,
            two_systems=False,
            tools_first=False,
            renders_tools=True,
            keeps_reasoning=False,
            loop_reasoning=True,
            tools_late=False,
        ),
    ),
    "dated": (
        DATED,
        Traits(
            mid_system=True,
            two_systems=True,
            tools_first=False,
            renders_tools=True,
            keeps_reasoning=False,
            has_date_string=True,
            writes_date=True,
            loop_reasoning=False,
            tools_late=False,
        ),
    ),
    "alternating": (
        ALTERNATING,
        Traits(
            mid_system=False,
            two_systems=False,
            tools_first=True,
            renders_tools=True,
            keeps_reasoning=False,
            loop_reasoning=False,
            tools_late=True,
        ),
    ),
    "tools-first": (
        TOOLS_FIRST,
        Traits(
            mid_system=True,
            two_systems=True,
            tools_first=True,
            renders_tools=True,
            keeps_reasoning=True,
            loop_reasoning=True,
            tools_late=False,
        ),
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
async def test_shapes(shape: str, engine: EngineFactory, tiny_model: Path, tmp_path: Path) -> None:
    """Each shape is told from its rendered samples, work-arounds of the engine included."""
    template, expected = SHAPES[shape]
    path = tmp_path / "template.jinja"
    path.write_text(template)
    async with driver(engine(tiny_model, chat_template_file=path).url) as backend:
        assert (await backend.facts()).template.strip() == template.strip()
        assert await Served(lambda: 0.0).learn(backend) == expected
