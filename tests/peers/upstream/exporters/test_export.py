"""Stand-in: what exports to ONNX and the like is tested elsewhere in Transformers."""


class ExportTesterMixin:
    """Nothing of it is in the source distribution."""
