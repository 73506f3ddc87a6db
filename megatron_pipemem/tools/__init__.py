"""The tools: they describe, plan, advise, launch and draw runs. They import the core; the core never imports them."""
