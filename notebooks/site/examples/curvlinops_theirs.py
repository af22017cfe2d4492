import numpy as np
import torch
from curvlinops import HessianLinearOperator, hutchinson_trace, xtrace

rng = np.random.default_rng(0)


def draw(*shape):
    return torch.tensor(rng.normal(size=shape))


x, y = draw(50, 4), draw(50, 1)
network = torch.nn.Sequential(
    torch.nn.Linear(4, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1)
).double()
network[0].weight.data, network[0].bias.data = draw(20, 4), draw(20)
network[2].weight.data, network[2].bias.data = draw(1, 20) / 5, draw(1)

torch.manual_seed(0)
hessian = HessianLinearOperator(
    network, torch.nn.MSELoss(), list(network.parameters()), [(x, y)]
)
print(xtrace(hessian, 60).item(), hutchinson_trace(hessian, 60).item())
