"""The formats of models' families, by name. A format's names are those of vLLM's parsers of calls."""

from collections.abc import Collection, Mapping

from starling_agent.parsers.calls import leading_objects, listed_objects, named_arguments, section, tagged_object, tagged_objects
from starling_agent.parsers.gemma import CLOSES as GEMMA_CLOSES
from starling_agent.parsers.gemma import OPENS as GEMMA_OPENS
from starling_agent.parsers.gemma import QUOTE as GEMMA_QUOTE
from starling_agent.parsers.gemma import gemma_call
from starling_agent.parsers.harmony import TOKENS as HARMONY_TOKENS
from starling_agent.parsers.harmony import read_messages
from starling_agent.parsers.keyed_calls import KeyedFormat, keyed_call, wrapped
from starling_agent.parsers.nested_calls import MARK, nested_calls
from starling_agent.parsers.python_calls import leading_python_calls, python_calls
from starling_agent.parsers.reading import Family, ReadCalls, Reading
from starling_agent.parsers.response_template import DESCRIBED
from starling_agent.parsers.source import Reader
from starling_agent.parsers.written_arguments import gemma_arguments, python_arguments
from starling_agent.parsers.written_calls import WrittenCalls, keyed_arguments

THINK = (("<think>", "</think>"),)
_QWEN_FORMAT = KeyedFormat(
    name_ends=">",
    parameter="<parameter=",
    key="(?P<key>[^>]*)",
    key_ends=">",
    value_ends="</parameter>",
    call_ends="</function>",
    lines=True,
)
QWEN_FUNCTION = keyed_call(_QWEN_FORMAT)
_QWEN_OFFERED = keyed_call(_QWEN_FORMAT, only_offered=True)
GLM_CALL = keyed_call(
    KeyedFormat(
        parameter="<arg_key>",
        key=r"(?P<key>.*?)</arg_key>\s*",
        key_ends="<arg_value>",
        value_ends="</arg_value>",
        call_ends="</tool_call>",
    )
)
KIMI_K3_CALL = keyed_call(
    KeyedFormat(
        name='.*?tool="(?P<name>[^"]*)".*',
        name_ends="<|sep|>",
        parameter="<|open|>argument ",
        key='.*?key="(?P<key>[^"]*)" type="(?P<type>[^"]*)".*',
        key_ends="<|sep|>",
        value_ends="<|close|>argument<|sep|>",
        call_ends="<|close|>call<|sep|>",
        attributes=True,
    )
)


def _invoked(mark: str = "", kind: str = r'(?: string="(?P<type>\w+)")?') -> ReadCalls:
    """Returns the reader of `<invoke name="f"><parameter name="a">1</parameter></invoke>`, with `mark` before the tags' names."""
    return keyed_call(
        KeyedFormat(
            name=' ?name="(?P<name>[^"]*)"\\s*/?',
            name_ends=">",
            parameter=f"<{mark}parameter",
            key=f' ?name="(?P<key>[^"]*)"{kind}',
            key_ends=">",
            value_ends=f"</{mark}parameter>",
            call_ends=f"</{mark}invoke>",
        )
    )


def _dsml(calls: str, gap: str = "") -> Mapping[str, ReadCalls]:
    mark = f"｜DSML｜{gap}"
    return {f"<{mark}{calls}>": section(f"<{mark}invoke", _invoked(mark), f"</{mark}{calls}>")}


def _dsml_written(calls: str, gap: str = "") -> WrittenCalls:
    mark = f"｜DSML｜{gap}"
    value_ends = f"</{mark}parameter>"
    return WrittenCalls(
        f'<{mark}invoke name="NAME">\n',
        f"</{mark}invoke>\n",
        f"\n\n<{mark}{calls}>\n",
        f"</{mark}{calls}>",
        arguments=keyed_arguments(
            f'<{mark}parameter name="KEY" string="IS_TEXT">', f"{value_ends}\n", value_ends, f"</{mark}invoke>"
        ),
    )


def _deepseek_written(begins: str, ends: str) -> WrittenCalls:
    return WrittenCalls(
        f"<｜tool▁call▁begin｜>{begins}",
        f"{ends}<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
    )


def _deepseek(name: str, arguments: str) -> Mapping[str, ReadCalls]:
    call = named_arguments(name, arguments, "<｜tool▁call▁end｜>")
    return {"<｜tool▁calls▁begin｜>": section("<｜tool▁call▁begin｜>", call, "<｜tool▁calls▁end｜>")}


def _mistral(reading: Reading, opening: str) -> Reader[None]:
    """Reads a list of objects, which models up to version 7 of the tokenizer write, or a name and its arguments."""
    if (yield from reading.source.next_character()) == "[":
        yield from listed_objects(reading, opening)
    else:
        yield from _mistral_named(reading, opening)


_mistral_named = named_arguments(r"\s*(?P<name>[^\[\s]+)(?:\[CALL_ID\](?P<id>[^\[]*))?", "[ARGS]")

_KIMI_K2 = section(
    "<|tool_call_begin|>",
    named_arguments(
        r"\s*(?P<id>(?:functions\.)?(?P<name>[^:\s]+)(?::\d+)?)\s*", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    ),
    "<|tool_calls_section_end|>",
)


def _qwen_bare(reading: Reading, opening: str) -> Reader[None]:
    """Reads a call of an offered tool whose opening marker was left out; models that do so still write the closing one."""
    calls = reading.output.calls
    yield from _QWEN_OFFERED(reading, opening)
    if reading.output.calls > calls:
        yield from reading.source.try_close("</tool_call>")


_llama4_object, _llama4_list = tagged_object("<|python_end|>"), python_calls("<|python_end|>")


def _llama4(reading: Reading, opening: str) -> Reader[None]:
    """Reads calls as Python or as JSON writes them: models write either, whatever their template shows."""
    if (yield from reading.source.try_read("<|python_end|>")):
        return
    is_object = (yield from reading.source.next_character()) == "{"
    yield from _llama4_object(reading, opening) if is_object else _llama4_list(reading, opening)


def _leading_llama4(reading: Reading) -> Reader[None]:
    """Reads them likewise where no marker opens them."""
    calls = reading.output.calls
    yield from leading_objects(reading)
    if reading.output.calls == calls and not reading.output.content.has_begun:
        yield from leading_python_calls(reading)


_PHI_CALLS: Mapping[str, ReadCalls] = {"functools": listed_objects, "<|tool_call|>": tagged_objects("<|/tool_call|>")}
"""vLLM's template asks for the first form. The second one is the model's own; llama.cpp's template shows objects alone in it."""

# The order is that in which templates are recognized: the more particular first.
_TABLE = (
    Family(
        "openai",
        whole=read_messages,
        tokens=HARMONY_TOKENS,
        trims=False,
        template=("<|channel|>", "<|message|>"),
        written=WrittenCalls("<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>", ""),
    ),
    Family(
        "gemma4",
        (("<|channel>thought\n", "<channel|>"),),
        {GEMMA_OPENS: gemma_call},
        written=WrittenCalls(
            f"{GEMMA_OPENS}call:NAME{{", f"}}{GEMMA_CLOSES}", trigger=f"{GEMMA_OPENS}call:", arguments=gemma_arguments
        ),
        tokens=("<|channel>", GEMMA_CLOSES, GEMMA_QUOTE),
        trims=False,
        template=("<|tool_call>call:",),
    ),
    Family("deepseek_v41", THINK, _dsml("calls", " "), template=("｜DSML｜", " calls>"), written=_dsml_written("calls", " ")),
    Family("deepseek_v4", THINK, _dsml("tool_calls"), template=("｜DSML｜", "tool_calls>"), written=_dsml_written("tool_calls")),
    Family("deepseek_v32", THINK, _dsml("function_calls"), template=("｜DSML｜",), written=_dsml_written("function_calls")),
    Family(
        "deepseek_v3",
        THINK,
        _deepseek("function<｜tool▁sep｜>(?P<name>[^\\n]+)\\n", "```json\n"),
        template=("<｜tool▁calls▁begin｜>", "```json"),
        written=_deepseek_written("function<｜tool▁sep｜>NAME\n```json\n", "\n```"),
        tokens=("<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
    ),
    Family(
        "deepseek_v31",
        THINK,
        _deepseek("(?P<name>[^\\n]+)", "<｜tool▁sep｜>"),
        template=("<｜tool▁calls▁begin｜>",),
        written=_deepseek_written("NAME<｜tool▁sep｜>", ""),
        tokens=("<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
    ),
    Family(
        "kimi_k3",
        (("<|open|>think<|sep|>", "<|close|>think<|sep|>"),),
        {"<|open|>tools<|sep|>": section("<|open|>call ", KIMI_K3_CALL, "<|close|>tools<|sep|>")},
        hidden=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
        tokens=("<|open|>", "<|close|>", "<|sep|>"),
        trims=False,
        template=("<|open|>", "<|sep|>"),
        spells_marks=False,
        written=WrittenCalls(
            '<|open|>call tool="NAME" index="1"<|sep|>',
            "<|close|>call<|sep|>",
            "<|open|>tools<|sep|>",
            "<|close|>tools<|sep|>",
            arguments=keyed_arguments(
                '<|open|>argument key="KEY" type="TYPE"<|sep|>',
                "<|close|>argument<|sep|>",
                "<|close|>argument<|sep|>",
                "<|close|>call<|sep|>",
            ),
        ),
    ),
    Family(
        "kimi_k2",
        THINK,
        {"<|tool_calls_section_begin|>": _KIMI_K2},
        trims=False,
        template=("<|tool_calls_section_begin|>",),
        written=WrittenCalls(
            "<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
        ),
        tokens=("<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ),
    Family(
        "mistral",
        (("[THINK]", "[/THINK]"), *THINK),
        {"[TOOL_CALLS]": _mistral},
        trims=False,
        template=("[TOOL_CALLS]",),
        written=WrittenCalls("[TOOL_CALLS]NAME[ARGS]", "", trigger="[TOOL_CALLS]"),
        tokens=("[ARGS]", "[CALL_ID]"),
        short_ids=True,
    ),
    Family(
        "glm45",
        THINK,
        {"<tool_call>": GLM_CALL},
        template=("<arg_key>",),
        written=WrittenCalls(
            "<tool_call>NAME",
            "</tool_call>",
            trigger="<tool_call>",
            arguments=keyed_arguments("<arg_key>KEY</arg_key><arg_value>", "</arg_value>", "</arg_value>", "</tool_call>"),
        ),
        tokens=("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    Family(
        "seed_oss",
        (("<seed:think>", "</seed:think>"),),
        {"<seed:tool_call>": section("<function=", QWEN_FUNCTION, "</seed:tool_call>")},
        template=("<seed:tool_call>",),
        written=WrittenCalls(
            "<seed:tool_call>\n<function=NAME>\n",
            "</function>\n</seed:tool_call>",
            trigger="<seed:tool_call>",
            arguments=keyed_arguments("<parameter=KEY>", "</parameter>\n", "</parameter>", "</function>"),
        ),
        tokens=("</seed:tool_call>",),
    ),
    Family(
        "minimax_m2",
        THINK,
        {"<minimax:tool_call>": section("<invoke", _invoked(kind=""), "</minimax:tool_call>")},
        template=("<minimax:tool_call>",),
        written=WrittenCalls(
            '<invoke name="NAME">\n',
            "</invoke>\n",
            "<minimax:tool_call>\n",
            "</minimax:tool_call>",
            arguments=keyed_arguments('<parameter name="KEY">', "</parameter>\n", "</parameter>", "</invoke>"),
        ),
        tokens=("</minimax:tool_call>",),
    ),
    Family(
        "minimax_m3",
        (("<mm:think>", "</mm:think>"),),
        {f"{MARK}<tool_call>": nested_calls},
        template=(MARK,),
        written=WrittenCalls(
            f'{MARK}<invoke name="NAME">',
            f"{MARK}</invoke>\n",
            f"{MARK}<tool_call>\n",
            f"{MARK}</tool_call>",
            arguments=keyed_arguments(f"{MARK}<KEY>", f"{MARK}</KEY>", MARK, f"{MARK}</invoke>"),
        ),
        tokens=(MARK,),
    ),
    Family(
        "step3",
        THINK,
        {"<｜tool_calls_begin｜>": section("<steptml:invoke", _invoked("steptml:", ""), "<｜tool_calls_end｜>")},
        template=("<steptml:invoke",),
        written=WrittenCalls(
            '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="NAME">',
            "</steptml:invoke><｜tool_call_end｜>",
            "<｜tool_calls_begin｜>",
            "<｜tool_calls_end｜>",
            arguments=keyed_arguments(
                '<steptml:parameter name="KEY">', "</steptml:parameter>", "</steptml:parameter>", "</steptml:invoke>"
            ),
        ),
        tokens=("<｜tool_calls_end｜>", "<｜tool_call_begin｜>", "<｜tool_call_end｜>", "<｜tool_sep｜>"),
    ),
    Family(
        "qwen3_coder",
        THINK,
        {"<tool_call>": wrapped("<function=", QWEN_FUNCTION, "</tool_call>"), "<function=": _qwen_bare},
        template=("<function=", "<parameter="),
        written=WrittenCalls(
            "<tool_call>\n<function=NAME>\n",
            "</function>\n</tool_call>",
            trigger="<tool_call>",
            arguments=keyed_arguments("<parameter=KEY>\n", "\n</parameter>\n", "\n</parameter>", "</function>"),
        ),
        tokens=("</tool_call>",),
    ),
    Family(
        "lfm2",
        THINK,
        {"<|tool_call_start|>": python_calls("<|tool_call_end|>")},
        template=("<|tool_call_start|>",),
        other_templates=(("<|tool_list_start|>",), ("List of tools: [", "keep_past_thinking")),
        written=WrittenCalls("[NAME(", ")]", "<|tool_call_start|>", "<|tool_call_end|>", arguments=python_arguments),
        tokens=("<|tool_call_end|>",),
    ),
    Family(
        "phi4_mini_json",
        calls=_PHI_CALLS,
        template=("functools",),
        written=WrittenCalls('functools[{"name": "NAME", "arguments": ', "}]", trigger="functools["),
        tokens=("<|/tool_call|>",),
    ),
    Family(
        "phi4_mini",
        calls=_PHI_CALLS,
        template=("<|tool|>", "<|/tool|>"),
        written=WrittenCalls('<|tool_call|>[{"name": "NAME", "arguments": ', "}]<|/tool_call|>", trigger="<|tool_call|>"),
        tokens=("<|/tool_call|>",),
        answer_role="tool_response",
    ),
    Family(
        "apriel",
        (("Here are my reasoning steps:\n", "[BEGIN FINAL RESPONSE]"),),
        {"<tool_calls>": tagged_objects("</tool_calls>")},
        hidden=("[END FINAL RESPONSE]",),
        template=("<tool_calls>[", "[BEGIN FINAL RESPONSE]"),
        written=WrittenCalls('<tool_calls>[{"name": "NAME", "arguments": ', "}]</tool_calls>", trigger="<tool_calls>"),
        tokens=("</tool_calls>",),
    ),
    Family(
        "granite",
        THINK,
        {"<|tool_call|>": listed_objects, "<tool_call>": listed_objects},
        template=("<|tool_call|>",),
        written=WrittenCalls('<|tool_call|>[{"name": "NAME", "arguments": ', "}]", trigger="<|tool_call|>"),
        answer_role="tool_response",
    ),
    Family(
        "hermes",
        THINK,
        {"<tool_call>": tagged_object("</tool_call>")},
        template=("<tool_call>", '"name"'),
        written=WrittenCalls('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", trigger="<tool_call>"),
        tokens=("</tool_call>",),
    ),
    Family(
        "llama4_json",
        calls={"<|python_start|>": _llama4},
        at_start=_leading_llama4,
        template=("<|header_start|>", '{"name": '),
        written=WrittenCalls('{"name": "NAME", "parameters": ', "}"),
        tokens=("<|python_end|>",),
    ),
    Family(
        "llama4_pythonic",
        calls={"<|python_start|>": _llama4},
        at_start=_leading_llama4,
        template=("<|python_start|>",),
        other_templates=(("<|header_start|>", "[func_name1("),),
        written=WrittenCalls("[NAME(", ")]", arguments=python_arguments),
        tokens=("<|python_end|>",),
    ),
    Family(
        "llama3_json",
        calls={"<|python_tag|>": tagged_object("<|eom_id|>")},
        at_start=leading_objects,
        trims=False,
        template=("<|start_header_id|>", '{"name":'),
        written=WrittenCalls('{"name": "NAME", "parameters": ', "}"),
    ),
)
FAMILIES: Mapping[str, Family] = {family.name: family for family in _TABLE}
"""The formats by name."""
OTHER_NAMES: Mapping[str, str] = {
    "qwen3_xml": "qwen3_coder",
    "glm47": "glm45",
    "pythonic": "llama4_pythonic",
    "llama3": "llama3_json",
    "deepseek_r1": "deepseek_v3",
    "qwen3": "hermes",
}
"""Names that vLLM's parsers also have: of calls, and of reasoning."""


AUTO, NONE = "auto", "none"
PARSER_NAMES = (AUTO, NONE, DESCRIBED, *sorted((*FAMILIES, *OTHER_NAMES)))
"""Names that settings may have: auto is the format of the chat template, none is no format, DESCRIBED the checkpoint's own."""


def family_named(name: str) -> Family | None:
    """Returns the format of that name, which is one of PARSER_NAMES other than auto and DESCRIBED."""
    return None if name == NONE else FAMILIES[OTHER_NAMES.get(name, name)]


def family_of_templates(templates: Collection[str]) -> Family | None:
    """Returns the format in which a checkpoint's chat templates write calls, if it is known."""
    for family in _TABLE:
        known = (family.template, *family.other_templates)
        if any(all(text in template for text in texts) for template in templates for texts in known):
            return family
    return None


def reasoning_of_templates(templates: Collection[str]) -> Family | None:
    """Returns a format whose marks of reasoning the templates have, if there is one."""
    own = family_of_templates(templates)
    if own is not None and (own.whole is not None or not own.spells_marks):
        return own
    for family in (*([own] if own is not None else []), *_TABLE):
        if any(opens in text or closes in text for opens, closes in family.reasoning for text in templates):
            return family
    return None
