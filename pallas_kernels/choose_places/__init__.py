"""An indexer's scores of a row's cached keys, and the places of each query's best."""
