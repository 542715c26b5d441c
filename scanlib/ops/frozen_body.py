"""What Ops with a frozen body have in common."""

from dataclasses import dataclass
from typing import Any, Self

from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FrozenFunctionGraph
from pytensor.graph.op import HasInnerGraph, Op
from pytensor.graph.traversal import toposort

from scanlib._compat import freeze_graph


@dataclass
class FlatGraph:
    """A frozen graph as it is pickled: its nodes in order, not one inside the other.

    Pickle calls itself for what an object holds, and Python's stack ends before a long step does.
    `inputs` are types. A node is its Op, its inputs and the types of its outputs. Its inputs, and
    the graph's `outputs`, are constants, or places among the inputs and all outputs of the nodes
    before.
    """

    inputs: list[Any]
    nodes: list[tuple[Op, list[Any], list[Any]]]
    outputs: list[Any]

    @classmethod
    def of(cls, graph: FrozenFunctionGraph) -> "FlatGraph":
        """Return a graph, written flat."""
        places = {inp: place for place, inp in enumerate(graph.inputs)}

        def written(variable: Variable) -> Any:
            return variable if isinstance(variable, Constant) else places[variable]

        nodes = []
        for node in toposort(graph.outputs, blockers=list(graph.inputs)):
            inputs = [written(inp) for inp in node.inputs]
            nodes.append((node.op, inputs, [out.type for out in node.outputs]))
            first = len(places)
            places.update((out, first + k) for k, out in enumerate(node.outputs))
        return cls([inp.type for inp in graph.inputs], nodes, [written(o) for o in graph.outputs])

    def frozen(self) -> FrozenFunctionGraph:
        """Return the graph."""
        inputs = [kind() for kind in self.inputs]
        variables = list(inputs)

        def read(place: Any) -> Variable:
            return place if isinstance(place, Constant) else variables[place]

        for op, places, kinds in self.nodes:
            made = [kind() for kind in kinds]
            Apply(op, [read(place) for place in places], made)
            variables += made
        return freeze_graph(inputs, [read(place) for place in self.outputs])


class HasFrozenBody(HasInnerGraph):
    """The `body` of an Op, as PyTensor's printing and traversal expect it.

    Comes before `Op` among the bases: it replaces methods of it.
    """

    body: FrozenFunctionGraph

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"body": FlatGraph.of(self.body)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state | {"body": state["body"].frozen()})

    @property
    def fgraph(self) -> FrozenFunctionGraph:
        return self.body

    @property
    def inner_inputs(self) -> list[Variable]:
        return list(self.body.inputs)

    @property
    def inner_outputs(self) -> list[Variable]:
        return list(self.body.outputs)

    @property
    def fn(self) -> Any:
        """None: a loop is compiled whole, there is no function of its body alone."""
        return None

    def clone(self) -> Self:
        return self
