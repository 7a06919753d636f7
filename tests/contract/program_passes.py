"""The forward and backward passes of a random program."""

from __future__ import annotations

from dataclasses import dataclass, field

from contract.program_models import Layer, ModelWriter


@dataclass
class Graph:
    """A loss whose backward has not run."""

    loss: str
    checkpoints: set[str] = field(default_factory=set)  # "True" or "False": use_reentrant


class PassWriter(ModelWriter):
    """Writes micro-batches, and what may come between a forward and its backward."""

    # Forward

    def forward(self, *, recorded: bool = True) -> Graph:
        graph = Graph(f"loss{self.graphs}")
        self.graphs += 1
        rows, needs_grad = self.rng.randint(5, 7), self.chance(0.7)
        self.add(f"x = w.rows({rows}, requires_grad={needs_grad})")
        self.add("h = net.dense(x)")
        extra = ""
        for layer in self.rng.sample(self.layers, len(self.layers)):
            uses = self.rng.choice([0, 1, 1, 1, 1, 1, 1, 2])
            self.features.update(["layer without a use"] * (uses == 0))
            for _ in range(uses):
                self.use(layer, rows, graph if recorded else None)
            if self.chance(0.3):
                extra = self.plain_use(layer, extra)
        terms = ["w.loss(h)"] + [extra] * bool(extra)
        self.rng.shuffle(terms)
        self.add(f"{graph.loss} = {' + '.join(terms)}")
        return graph

    def counts(self, rows: int) -> list[int]:
        """Rows of each expert, some without any; seldom fewer than there are."""
        if self.chance(0.15):
            rows -= 1
            self.features.add("padding")
        counts = [0, 0, 0]
        for _ in range(rows):
            counts[self.rng.choice([0, 1, 2] if self.chance(0.5) else [0, 2])] += 1
        self.features.update(["experts without tokens"] * (0 in counts))
        return counts

    def use(self, layer: Layer, rows: int, graph: Graph | None) -> None:
        """Use a layer, perhaps in a checkpoint if there is a graph, or its weight by the function."""
        counts = self.counts(rows)
        call = f"net.{layer.name}(h, {counts})"
        if layer.compiled:
            call = f"compiled_{layer.name}(h, {counts})"
        elif layer.kind == "mlp" and self.chance(0.4):
            call = f"net.{layer.name}(h, {counts}, h[:, 0].sigmoid())"
            self.features.add("probs")
        elif layer.kind == "linear" and self.chance(0.3):
            call = self.function(layer, counts)
        if graph and self.chance(0.25):
            reentrant = self.one_of("True", "False")
            graph.checkpoints.add(reentrant)
            call = f"checkpoint(lambda h: {call}, h, use_reentrant={reentrant})"
            self.features.add(f"checkpoint, use_reentrant={reentrant}")
        self.add(f"h = h + {call}")

    def function(self, layer: Layer, counts: list[int]) -> str:
        weight = f"net.{layer.name}.weight" if layer.packed else f"[{', '.join(layer.params)}]"
        options = ""
        # Refused: "main_grad" for a weight that is not a leaf.
        if layer.packed and layer.mode != "main_grad" and self.chance(0.4):
            weight = self.one_of(f"0.5 * {weight}", f"{weight}.unbind()")
            self.features.add("weight that is not a leaf")
        elif self.queue and layer.delayed:
            options = ", wgrad_queue=queue"
        elif layer.delayed:
            options = f", wgrad_queue=net.{layer.name}.wgrad_queue"
        if self.chance(0.4):
            options += ", weight_layout='in_out'"
            self.features.add("in_out")
        self.features.add("grouped_linear")
        return f"w.grouped_linear(h, {weight}, {counts}, accumulate_wgrad={layer.mode!r}{options})"

    def plain_use(self, layer: Layer, extra: str) -> str:
        """Use a weight of the layer in plain PyTorch; returns the name of what is added to the loss."""
        weight = self.rng.choice(layer.params)
        if layer.kind == "linear" and self.chance(0.5):
            product = "torch.einsum('rh,eoh->ro', h, {})" if layer.packed else "torch.einsum('rh,oh->ro', h, {})"
            self.add(f"h = h + 0.2 * {product.format(weight)}", "plain use: einsum")
            return extra
        self.add(f"extra = {f'{extra} + ' * bool(extra)}0.1 * {weight}.square().sum()", "plain use: square")
        return "extra"

    # Backward

    def backward(self, graph: Graph) -> None:
        # Refused by PyTorch: a graph whose buffers its backward reuses is differentiated once.
        keep = self.chance(0.15) and not self.compiled
        if self.chance(0.15):
            self.autograd_grad(graph)
        if self.chance(0.1):
            self.backward_of_some(graph)
        thawed = ""
        # Refused: by a checkpoint that is not reentrant, and by a graph, as they expect what forward saw.
        if self.chance(0.1) and not graph.checkpoints and not self.compiled:
            thawed = self.freeze_one("frozen between forward and backward")
        self.add(f"{graph.loss}.backward({'retain_graph=True' * keep})")
        if keep:
            self.add(f"{graph.loss}.backward()", "backward twice")
        if self.chance(0.3):
            self.run_queues("one micro-batch" if self.chance(0.7) else "all")
        if thawed:
            self.run_queues("all")
            self.thaw(thawed)

    def autograd_grad(self, graph: Graph) -> None:
        # Refused by PyTorch: a reentrant checkpoint in autograd.grad; by fusedmlp: a graph that adds to main_grad.
        if "True" in graph.checkpoints or self.compiled:
            return
        param = self.rng.choice(self.free(self.params))
        self.add(f"(grad,) = torch.autograd.grad({graph.loss}, [{param}], retain_graph=True, allow_unused=True)")
        self.add(f"w.see('autograd.grad of {param}', grad)", "autograd.grad")
        # Not for parameters of an owner: a gradient that somebody puts into .grad is for the owner to add.
        if (self.buffered != "owner" or param.startswith("net.dense")) and self.chance(0.3):
            # Wrong in PyTorch: fused optimizers with a .grad of other strides than its parameter.
            with self.block("if grad is not None:"):
                total = f"grad if {param}.grad is None else {param}.grad + grad"
                self.add(f"{param}.grad = ({total}).contiguous()", ".grad set by hand")

    def backward_of_some(self, graph: Graph) -> None:
        if "True" in graph.checkpoints or self.compiled:
            return
        inputs = ", ".join(self.some(self.free(self.params)))
        self.add(f"{graph.loss}.backward(inputs=[{inputs}], retain_graph=True)", "backward(inputs=...)")

    def freeze_one(self, feature: str) -> str:
        """Freeze an expert weight without a hook; returns it, or nothing if there is none."""
        # Different from PyTorch: the tensor hook of a weight that is frozen between forward and backward gets None.
        free = [p for p in self.free(self.expert_params) if p not in self.hooks.values()]
        if not free:
            return ""
        param = self.rng.choice(free)
        self.frozen.add(param)
        self.add(f"{param}.requires_grad_(False)", feature)
        return param

    def thaw(self, param: str) -> None:
        self.frozen.discard(param)
        self.add(f"{param}.requires_grad_()", "unfreezing")

    def run_queues(self, how: str) -> None:
        if self.queue:
            self.add(f"queue.run{'_oldest' * (how == 'one micro-batch')}()", f"queue run, {how}")
            return
        for layer in self.layers:
            if layer.delayed:
                self.add(f"net.{layer.name}.backward_dw()", "backward_dw")

    def microbatches(self) -> None:
        """Run one to three micro-batches one after another, or all forwards first, or as one loss."""
        count = self.rng.choice([1, 1, 2, 2, 3])
        order = self.one_of("in turn", "in turn", "forwards first", "last backward first", "one loss")
        self.features.update([f"micro-batches: {order}"] * (count > 1))
        if order == "in turn" or count == 1:
            for _ in range(count):
                self.backward(self.forward())
        else:
            graphs = [self.forward() for _ in range(count)]
            if order == "one loss":
                loss = f"loss{self.graphs}"
                self.graphs += 1
                self.add(f"{loss} = {' + '.join(graph.loss for graph in graphs)}")
                graphs = [Graph(loss, set().union(*(graph.checkpoints for graph in graphs)))]
            for graph in reversed(graphs) if order == "last backward first" else graphs:
                self.backward(graph)
        self.run_queues("all")
