"""Methods that quantize the weights of a model, with statistics of its inputs."""
