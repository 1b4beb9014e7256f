"""Small experiments that train no network on an environment, or analyse a trained one."""
