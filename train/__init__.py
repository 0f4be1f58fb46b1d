"""One model made better: data, model, inner loop, evaluation; and recipes turned into members."""
