import gpytorch
import numpy as np
import torch
from linear_operator import to_linear_operator

points = torch.tensor(np.random.default_rng(0).uniform(size=(600, 2)))
squared = (points[:, None] - points).pow(2).sum(-1)
y = torch.sin(6 * points[:, 0])
length = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)

torch.manual_seed(0)
with gpytorch.settings.max_cholesky_size(0):  # as for matrices too large to factorise
    kernel = to_linear_operator(torch.exp(-squared / 2 / length**2))
    noisy = kernel.add_diagonal(torch.tensor(0.01, dtype=torch.float64))
    inv_quad, logdet = noisy.inv_quad_logdet(y[:, None], logdet=True)
    loss = (inv_quad + logdet) / 2
    loss.backward()
print(loss.item(), length.grad.item())
