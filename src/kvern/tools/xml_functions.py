"""Calls between XML tags that name a function, with tags around each parameter: Qwen3-Coder, MiniMax, GLM and others.

    <tool_call>                             <minimax:tool_call>
    <function=get_weather>                  <invoke name="get_weather">
    <parameter=city>                        <parameter name="city">Oslo</parameter>
    Oslo                                    </invoke>
    </parameter>                            </minimax:tool_call>
    </function>
    </tool_call>

GLM 4.5 and later have <tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>, with line
breaks or without. The outer opening is often forgotten; then only the request's tools count.
"""

from kvern.tools.tool_format import NUMBER, ToolParser, ToolSchemas
from kvern.tools.xml_call import XmlParser
from kvern.tools.xml_form import Gaps, XmlForm

CALL, CALL_END = "<tool_call>", "</tool_call>"


class XmlFunctions(XmlForm):
    """The format of one family; see ToolFormat and XmlForm."""

    def parser(self, tools: ToolSchemas) -> ToolParser:
        """The outer tags leave no doubt, so that calls of unknown tools within them are calls, too."""
        return XmlParser(self, tools)


QWEN3_CODER = XmlFunctions(
    "qwen3_coder",
    (CALL, CALL_END),
    ("<function=", ">", "</function>"),
    ("<parameter=", ">", "</parameter>"),
    lined=True,
)
SEED = XmlFunctions(
    "seed",
    ("<seed:tool_call>", "</seed:tool_call>"),
    ("<function=", ">", "</function>"),
    ("<parameter=", ">", "</parameter>"),
)
MINIMAX = XmlFunctions(
    "minimax",
    ("<minimax:tool_call>", "</minimax:tool_call>"),
    ('<invoke name="', '">', "</invoke>"),
    ('<parameter name="', '">', "</parameter>"),
    several_inside=True,
)
DSML = tuple(
    XmlFunctions(
        name,
        (f"<｜DSML｜{outer}>", f"</｜DSML｜{outer}>"),
        ('<｜DSML｜invoke name="', '">', "</｜DSML｜invoke>"),
        ('<｜DSML｜parameter name="', '" string="{}">', "</｜DSML｜parameter>"),
        several_inside=True,
        types="strings",
    )
    for name, outer in (("deepseek_v32", "function_calls"), ("deepseek_v4", "tool_calls"))
)
KIMI_K3 = XmlFunctions(
    "kimi_k3",
    ("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
    ('<|open|>call tool="', f'" index="{NUMBER}"<|sep|>', "<|close|>call<|sep|>"),
    ('<|open|>argument key="', '" type="{}"<|sep|>', "<|close|>argument<|sep|>"),
    several_inside=True,
    types="words",
    gaps=Gaps("", "", "", "", "", "", ""),
)
HY3 = XmlFunctions(
    "hy3",
    ("<tool_calls:opensource>", "</tool_calls:opensource>"),
    ("<tool_call:opensource>", "<tool_sep:opensource>", "</tool_call:opensource>"),
    ("<arg_key:opensource>", "</arg_key:opensource>\n<arg_value:opensource>", "</arg_value:opensource>"),
    several_inside=True,
    gaps=Gaps(key="\n"),
)
GLM = XmlFunctions(
    "glm",
    ("", ""),
    (CALL, "", CALL_END),
    ("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>"),
    gaps=Gaps(opened="", key="\n"),
    stops=("<|observation|>",),
    hint=f"{CALL}function_name",
)
"""GLM 4.5; GLM 4.7 has no line breaks."""
MINICPM5 = XmlFunctions(
    "minicpm5",
    ("", ""),
    ('<function name="', '">', "</function>"),
    ('<param name="', '">', "</param>"),
    gaps=Gaps("", "", "", "", "", "", "\n"),
)
FUNCTIONARY = XmlFunctions(
    "functionary",
    ("", ""),
    ("<function=", ">", "</function>"),
    ("<parameter=", ">", "</parameter>"),
    in_json=True,
    gaps=Gaps("", "", "", "", "", "", ""),
)
MUSE = XmlFunctions(
    "muse",
    ("<atem:function_calls>", "</atem:function_calls>"),
    ('<atem:invoke name="', '">', "</atem:invoke>"),
    ('<atem:parameter name="', '">', "</atem:parameter>"),
    header=("<|eom|><|start|>assistant", " to=", "<|message|>"),
)
XML_FORMATS = (QWEN3_CODER, MINIMAX, SEED, *DSML, KIMI_K3, HY3, MINICPM5, FUNCTIONARY, MUSE)
