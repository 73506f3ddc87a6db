"""Compute an input embedding, and an LM head with its cross entropy, that are cut by rows over the ranks of a group.

Each phase computes only on its own rank. Between phases, the caller starts collectives with the functions of
``collectives``. So a schedule can place each of them as an action.

Rank k owns rows W_k and computes Y_k = X W_k^T, m_k = max Y_k and s_k = sum of exp(Y_k - m_k) over all rows but the
label's, in fp32. These and the label's logit are gathered: M = max of m_k, O = sum of s_k exp(m_k - M), t = the label's
logit minus M. With Z = O + exp(t), loss = log Z - t. Let g be the gradient of the training loss with respect to the loss
of a token. Then:

    dY_k = g (exp(Y_k - M) / Z - onehot)
    dX = sum over ranks of dY_k W_k        dW_k += dY_k^T X

Algorithm 1 computes dY_k W_k in T, once g is known. Algorithm 2 averages the rows of W_k by the local softmax in S, and
scales the average once M and Z are known, so its reduction of dX does not wait for g. This is Algorithm 2:

```python
import torch

from megatron_pipemem.features.vocabulary.runtime import collectives
from megatron_pipemem.features.vocabulary.runtime.head import combine, finish_input_gradient

def head_pass(head, x, labels, loss_function, last, group):
    # x: output of the last stage, a buffer elsewhere. Returns its gradient on the last stage; adds that of W
    x = collectives.broadcast(x, last, group).wait()
    scored = head.score(x, labels)                                      # S
    gathered = scored.statistics.new_empty(group.size(), *scored.statistics.shape)
    done = combine(scored, collectives.gather_statistics(scored.statistics, gathered, group).wait())
                                                                        # done.losses: the same on every rank
    reduction = collectives.reduce_sum(done.input_gradient(), last, group)
    losses = done.losses.clone().requires_grad_()
    (g,) = torch.autograd.grad(loss_function(losses), losses)           # or on the last stage alone, then broadcast g
    total = reduction.wait()
    dx = None if total is None else finish_input_gradient(total, x.dtype, done.without_ignored(g))
    done.add_weight_gradient(g)                                         # T
    return dx
```

With two barriers, ``done.gradients(g)`` adds the weight gradient and returns this rank's part of dX. Reduce it;
``finish_input_gradient(total, x.dtype)`` then needs no g. The embedding calls ``embedding(tokens)`` and ``reduce_sum`` to
the first stage, and backward ``broadcast`` from there and ``embedding.add_weight_gradient(tokens, gradient)``. Evaluation
calls ``head.score(..., for_backward=False)`` and ``combine()``, inference ``head.logits(x)``, ``collectives.gather_logits``
and ``joined_logits``.

Statistics, losses and softmax are fp32, and gradients go to ``main_grad`` if the parameter has one. A label outside of the
vocabulary has loss 0 and no gradient. Bias, soft cap, z-loss, label smoothing and fp8 are not supported.
"""
