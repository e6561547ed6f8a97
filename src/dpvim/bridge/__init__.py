"""NumPyro models as problems over records: data, latent space, checks of a model, guides."""
