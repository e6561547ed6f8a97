"""The guarantee: plan, accountant, batches, clip, noise. Data are released here or nowhere."""
