"""The spellings of weight normalisation that files of a codec come in."""


def old_names(tensors):
    return {
        name.replace(".parametrizations.weight.original0", ".weight_g").replace(
            ".parametrizations.weight.original1", ".weight_v"
        ): tensor
        for name, tensor in tensors.items()
    }
