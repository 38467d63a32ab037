"""Chat templates as syntax trees: what may not be written, and where costs are counted.

Jinja lets an environment intercept calls, attributes and some operators. The rest (loops, text
between tags, comparisons, `~`, slices, literals) is rewritten here into calls of the environment.
"""

from __future__ import annotations

from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.visitor import NodeTransformer

_FILES = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)


class GenerationExtension(Extension):
    """`{% generation %} … {% endgeneration %}` marks what the assistant says; it changes nothing
    in the text."""

    tags = frozenset({"generation"})

    def parse(self, parser: Parser) -> nodes.Scope:
        """The statements inside, in a scope of their own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def metered(tree: nodes.Template) -> nodes.Template:
    """The tree with every cost counted. Raises `TemplateSyntaxError` for other files."""
    for node in tree.find_all(_FILES):
        raise TemplateSyntaxError("a chat template cannot load other templates", node.lineno)
    tree = _Metering().visit(tree)
    tree.set_environment(tree.environment)
    return tree


def _call(name: str, node: nodes.Node, *args: nodes.Expr) -> nodes.Call:
    """Call of the environment's method `name`, at the line of `node`."""
    method = nodes.EnvironmentAttribute(name, lineno=node.lineno)
    return nodes.Call(method, list(args), [], None, None, lineno=node.lineno)


def _const(value: Any, node: nodes.Node) -> nodes.Const:
    return nodes.Const(value, lineno=node.lineno)


class _Metering(NodeTransformer):
    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        step = nodes.ExprStmt(_call("step", node), lineno=node.lineno)
        node.body = [step, *node.body]
        if node.test is not None:
            # The condition of a loop is tried for items, too, that never get into its body.
            node.test = nodes.And(_call("step", node), node.test, lineno=node.lineno)
        return node

    def visit_Output(self, node: nodes.Output) -> list[nodes.Node]:
        self.generic_visit(node)
        data = sum(len(n.data) for n in node.nodes if isinstance(n, nodes.TemplateData))
        if not data:
            return [node]
        written = nodes.ExprStmt(_call("written", node, _const(data, node)), lineno=node.lineno)
        return [written, node]

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        return _call("joined", node, *node.nodes)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Expr:
        self.generic_visit(node)
        if len(node.ops) == 1:
            (operand,) = node.ops
            return _call("compare", node, _const(operand.op, node), node.expr, operand.expr)
        node.expr = _call("touched", node, node.expr)
        for operand in node.ops:
            operand.expr = _call("touched", node, operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        ends = (node.arg.start, node.arg.stop, node.arg.step)
        return _call(
            "cut", node, node.node, *(_const(None, node) if e is None else e for e in ends)
        )

    def visit_List(self, node: nodes.List) -> nodes.Expr:
        self.generic_visit(node)
        return _call("hold", node, node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        self.generic_visit(node)
        return _call("hold", node, node) if node.ctx == "load" else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Expr:
        self.generic_visit(node)
        return _call("hold", node, node)
