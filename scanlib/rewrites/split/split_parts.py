"""What of a loop leaves it: before the loop, after it, or altogether.

`SplitParts` looks at one body. With `R` the recurrent parts (states, and carries that do more than
add up), a value of the body is

* *fixed* if it reads non-sequences alone,
* *early* if it reads rows of sequences, but no part of `R`,
* *recurrent* if the next value of a part of `R` needs it,
* *late* otherwise: outputs and sums alone need it.

The cost rule of `over_time.split_cost` says which early and late values leave the loop.
"""

from collections.abc import Iterable

from pytensor.configdefaults import config
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.traversal import ancestors, toposort
from pytensor.scalar import basic as ps
from pytensor.tensor.elemwise import Elemwise

from scanlib.ops.graph import applies, depends_on, is_tensor
from scanlib.ops.loop import Carry, Loop, Output, State
from scanlib.rewrites.lower.canonical_loop import split_sums
from scanlib.rewrites.over_time.split_cost import (
    BOUND,
    HEAVY,
    LIGHT,
    PAIRS,
    PRODUCT,
    is_arithmetic,
    is_function,
    is_sum_of_products,
    is_view,
    kind,
    multiplies_a_vector,
    of_differing_shapes,
    varying_index,
)


class SplitParts:
    """The plan for one loop.

    `sums` are carries, and states that are not stored, that only add up, with what a step adds;
    `recurrent` are all others. The loop reads the early values `before` as rows instead of
    computing them. `outputs` are evaluated as a batch, `taken_sums` become sums over rows or matrix
    products, and the loop has the values `stored` for these.
    """

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.sums, self.recurrent = split_sums(loop, loop.recurrent)
        reads = [v for part in self.recurrent for v in part.taps.values()]
        rows = [sequence.row for sequence in loop.sequences]
        roots = [*loop.body_outputs(), *(added for _, added in self.sums)]
        self.late_or_recurrent = depends_on(roots, reads)
        self.varying = depends_on(roots, [*reads, *rows])
        self.needed = set(ancestors([part.next for part in self.recurrent]))
        self.differing = of_differing_shapes(roots, [*reads, *rows])
        self.given = [v for v in self.needed - self.differing if v in self.late_or_recurrent]
        self.kinds = {node: kind(node, self.varying.__contains__) for node in toposort(roots)}
        self.before: list[Variable] = []
        self.outputs: list[Output] = []
        self.taken_sums: list[tuple[State | Carry, Variable]] = []
        self.stored: list[Variable] = []
        self._visited: set[Variable] = set()

    # What a batch can compute

    def fits(self, variable: Variable) -> bool:
        """Whether a batch computes a value, given what the loop stores."""
        for node in toposort([variable], blockers=self.given):
            if self.kinds[node] in (HEAVY, BOUND) and self._differs(node):
                return False
        return is_tensor(variable)

    def _differs(self, node: Apply) -> bool:
        return any(out in self.varying for out in node.outputs)

    def is_costly(self, variable: Variable, late: bool = False) -> bool:
        """Whether something late or early above a value pays for a batch; late alone, if asked."""
        return any(
            self.kinds[node] == PRODUCT
            and self._differs(node)
            and not (late and self.late_or_recurrent.isdisjoint(node.outputs))
            for node in toposort([variable], blockers=self.given)
        )

    # The plan

    def plan(self) -> bool:
        """Fill in what leaves the loop; return whether anything does."""
        if self._is_kernel():
            return False
        if not self.recurrent:
            self._plan_without_recurrence()
        else:
            self._plan_beside_recurrence()
        return bool(self.before or self.outputs or self.taken_sums)

    def _is_kernel(self) -> bool:
        """Whether a loop without recurrence is elementwise work with a function among it."""
        if self.recurrent or self.sums or not config.scanlib__lower:
            return False
        differing = [node for node in self.kinds if self._differs(node)]
        return any(is_function(node) for node in differing) and all(
            isinstance(node.op, Elemwise) for node in differing
        )

    def _plan_without_recurrence(self) -> None:
        outputs = [part for part in self.loop.outputs if self.fits(part.value)]
        sums = [(carry, added) for carry, added in self.sums if self.fits(added)]
        everything = len(outputs) == len(self.loop.outputs) and len(sums) == len(self.sums)
        if config.scanlib__split_maps:
            self.outputs = [p for p in outputs if everything or self.is_costly(p.value)]
            if self.sums and everything and not any(self.is_costly(p.value) for p in outputs):
                # A loop of sums stays for elementwise work, and with it what costs no pass.
                self.outputs = []
        if config.scanlib__split_sums:
            self.taken_sums = [
                (carry, added) for carry, added in sums if self._is_product_sum(added)
            ]
        if config.scanlib__split_maps:
            self._take_before()

    def take_all_sums(self) -> None:
        """Let all go, if a loop of what remains could not be lowered."""
        if config.scanlib__split_sums:
            self.taken_sums = [(c, added) for c, added in self.sums if self.fits(added)]
        if config.scanlib__split_maps and len(self.taken_sums) == len(self.sums):
            self.outputs = [part for part in self.loop.outputs if self.fits(part.value)]

    def _plan_beside_recurrence(self) -> None:
        if config.scanlib__split_maps:
            for part in self.loop.outputs:
                if part.value in self.needed and part.value in self.late_or_recurrent:
                    continue
                fits = part.value in self.varying and self.fits(part.value)
                if fits and self.is_costly(part.value, late=True):
                    self.outputs.append(part)
        if config.scanlib__split_sums:
            for carry, added in self.sums:
                if self.fits(added) and self._is_product_sum(added):
                    self.taken_sums.append((carry, added))
        self._visit(part.value for part in self.outputs)
        self._visit(added for _, added in self.taken_sums)
        if config.scanlib__split_maps:
            self._take_before()

    def has_product_sums(self) -> bool:
        """Whether a sum over time is a matrix product."""
        return any(self._is_product_sum(added) for _, added in self.sums)

    def _is_product_sum(self, added: Variable) -> bool:
        """Whether a sum over time is made of matrix products, or of what only a batch computes."""
        if self.is_costly(added):
            return True
        node = added.owner
        if node is None:
            return False
        if not is_view(node) and self.kinds.get(node) != LIGHT:
            return self.kinds.get(node) in (PRODUCT, PAIRS)
        if is_sum_of_products(node) or varying_index(node, self.varying.__contains__):
            return True
        if is_view(node):
            return self._is_product_sum(node.inputs[0])
        return applies(node, ps.Add | ps.Sub) and all(map(self._is_product_sum, node.inputs))

    # What the loop stores for what comes after it

    def _visit(self, values: Iterable[Variable]) -> None:
        """Find out how values that a batch reads come to be."""
        for value in values:
            if value in self._visited or self.is_there(value):
                continue
            self._visited.add(value)
            node = value.owner
            if node is None:
                self.stored.append(value)
                continue
            if value in self.needed and value in self.late_or_recurrent:
                if self._is_cheap_again(value):
                    continue
                viewed = is_view(node) and node.inputs[0] in self.late_or_recurrent
                if not viewed or not is_tensor(node.inputs[0]):
                    self.stored.append(value)
                    continue
            if self._is_smaller(value):
                self.stored.append(value)
                continue
            self._visit(node.inputs)

    def _is_smaller(self, value: Variable) -> bool:
        """Whether a value, which no late product goes into, has fewer axes than what it is computed
        from, as an item, or the sum, of an array that would have to be stored at each step."""
        is_storable = is_tensor(value) and value not in self.differing
        if not is_storable or self.is_costly(value, late=True):
            return False
        missing = [inp for inp in value.owner.inputs if not self._is_cheap_again(inp)]
        return _rank(value) < max((_rank(inp) for inp in missing if is_tensor(inp)), default=0)

    def is_there(self, value: Variable) -> bool:
        """Whether the values of all steps are known once the loop has run."""
        if isinstance(value, Constant) or value not in self.late_or_recurrent:
            return True
        if value in self.stored:
            return True
        for state in self.loop.states:
            if not state.untraced and (value is state.next or value in state.taps.values()):
                return True
        return any(part.value is value for part in self._kept_outputs())

    def _kept_outputs(self) -> list[Output]:
        return [part for part in self.loop.outputs if part not in self.outputs]

    def _is_cheap_again(self, value: Variable) -> bool:
        """Whether a value is arithmetic on what is there."""
        if self.is_there(value):
            return True
        node = value.owner
        if node is None or not is_arithmetic(node) or self.kinds[node] == BOUND:
            return False
        return all(self._is_cheap_again(inp) for inp in node.inputs)

    # What the loop reads instead of computing it

    def _take_before(self) -> None:
        """Choose early values: products, and light work among several of them or on the way."""
        roots = self.remaining_roots()
        nodes = list(toposort(roots))
        products = [
            n
            for n in nodes
            if self.kinds[n] == PRODUCT
            and self._leaves(n)
            and multiplies_a_vector(n, self.varying.__contains__)
        ]
        if not products:
            return
        derived = depends_on(roots, [n.outputs[0] for n in products])
        upstream = set(ancestors([n.outputs[0] for n in products]))
        outside = {n.outputs[0] for n in products}
        for node in nodes:
            out = node.outputs[0]
            if out not in derived or not self._leaves(node) or self.kinds[node] == PRODUCT:
                continue
            joins = sum(inp in outside for inp in set(node.inputs)) > 1
            if (joins and self._grows_not(node)) or out in upstream:
                outside.add(out)
        readers = [n for n in nodes if n.outputs[0] not in outside]
        read = {inp for node in readers for inp in node.inputs} | set(roots)
        self.before = [n.outputs[0] for n in nodes if n.outputs[0] in outside & read]

    def _leaves(self, node: Apply) -> bool:
        out = node.outputs[0]
        early = len(node.outputs) == 1 and self._differs(node) and out not in self.late_or_recurrent
        return early and self.fits(out)

    def _grows_not(self, node: Apply) -> bool:
        rank = node.outputs[0].type.ndim
        return rank > 0 and all(
            inp.type.ndim == rank and not any(inp.type.broadcastable)
            for inp in node.inputs
            if inp in self.varying
        )

    # What remains

    def remaining_roots(self) -> list[Variable]:
        """Return what the remaining loop computes."""
        taken = dict(self.taken_sums)
        roots = [part.next for part in self.loop.recurrent if part not in taken]
        roots += [part.value for part in self._kept_outputs()]
        return [*roots, *self.stored]


def _rank(value: Variable) -> int:
    return value.type.broadcastable.count(False)
