"""Code that several families share: reading and writing configs, links between tensor names, common architectures."""
