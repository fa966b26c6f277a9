"""Models of data without tokens, such as small images and points: autoencoder, variational autoencoder, GAN."""
