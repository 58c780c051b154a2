"""Reads from a chat template's syntax tree how it uses its messages."""

from collections.abc import Iterator

from jinja2 import nodes

_TYPE_TESTS = {"string", "iterable", "sequence", "mapping"}
_SEARCHES = {
    "split",
    "rsplit",
    "partition",
    "rpartition",
    "startswith",
    "endswith",
    "replace",
    "removeprefix",
    "removesuffix",
    "find",
    "rfind",
    "index",
    "rindex",
    "count",
}
"""Methods of texts, and filters, that look for their first argument."""


def loops_over_content(tree: nodes.Template) -> bool:
    return any(_is_content(loop.iter) for loop in tree.find_all(nodes.For))


def tests_type_of_content(tree: nodes.Template) -> bool:
    return any(test.name in _TYPE_TESTS and _is_content(test.node) for test in tree.find_all(nodes.Test))


def reads_field(tree: nodes.Template, name: str) -> bool:
    """Returns whether the template reads a field of that name, whatever has it."""
    by_key = any(isinstance(item.arg, nodes.Const) and item.arg.value == name for item in tree.find_all(nodes.Getitem))
    by_call = any(_constant(argument) == name for call in tree.find_all(nodes.Call) for argument in call.args[:1])
    return by_key or by_call or any(item.attr == name for item in tree.find_all(nodes.Getattr))


def sought_texts(tree: nodes.Template) -> frozenset[str]:
    """Returns the constant texts that the template looks for: `'</think>' in content`, `content.split('</think>')`, ..."""
    names = {
        assigned.target.name: assigned.node.value
        for assigned in tree.find_all(nodes.Assign)
        if isinstance(assigned.target, nodes.Name) and isinstance(assigned.node, nodes.Const)
    }
    values = [names.get(node.name) if isinstance(node, nodes.Name) else _constant(node) for node in _sought(tree)]
    return frozenset(value for value in values if isinstance(value, str) and value)


def written_texts(tree: nodes.Template) -> frozenset[str]:
    """Returns the constant texts that the template may write: those between its tags, and those in its expressions."""
    data = (part.data for part in tree.find_all(nodes.TemplateData))
    constants = (constant.value for constant in tree.find_all(nodes.Const) if isinstance(constant.value, str))
    return frozenset((*data, *constants))


def _sought(tree: nodes.Template) -> Iterator[nodes.Node]:
    for comparison in tree.find_all(nodes.Compare):
        yield comparison.expr
        yield from (operand.expr for operand in comparison.ops)
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr in _SEARCHES:
            yield from call.args[:1]
    for filtered in tree.find_all(nodes.Filter):
        if filtered.name in _SEARCHES:
            yield from filtered.args[:1]


def _constant(node: nodes.Node) -> object:
    return node.value if isinstance(node, nodes.Const) else None


def _is_content(node: nodes.Node) -> bool:
    """Matches `content`, `message.content`, `message['content']`, `messages[0]['content']`, also with filters and slices."""
    match node:
        case nodes.Name(name="content") | nodes.Getattr(attr="content"):
            return True
        case nodes.Getitem(arg=nodes.Const(value="content")):
            return True
        case nodes.Filter(node=nodes.Node() as inner) | nodes.Getitem(node=inner, arg=nodes.Slice()):
            return _is_content(inner)
    return False
