-- Query the ledger. Returns, by the first argument:
--   'by_agent', node
--                  whether our agent sent the node's latest device report
--   'vanished'     pods that are gone and have leases
--   'gone', pods   those of the pods that were reported as gone
--   'claimed'      ordinary resources that claims reserve: rows of {node, resource, amount}
--   'gangs'        {gang, pod} of every live lease that counts for its gang
--   'waiting_gangs'
--                  {gang, pod} of every waiting pod that counts for its gang
--   'fair_share'   {cores, MiB} of all healthy devices; namespaces, each followed by the cores in use;
--                  the same for MiB; and rows of {namespace, whether its budget is exhausted, weight,
--                  whether its new pods wait}
--   'unreadable'   kind and key of records that could not be read in the last 24 hours
local queries = {}

function queries.unreadable()
  return call('HKEYS', PREFIX .. 'unreadable')
end

function queries.by_agent()
  return call('HGET', PREFIX .. 'facts:' .. ARGS[2], 'by_agent') == '1'
end

function queries.vanished()
  return call('SMEMBERS', PREFIX .. 'vanished')
end

function queries.gone()
  local found = {}
  for pod in pairs(gone_pods.among(ARGS[2])) do found[#found + 1] = pod end
  return found
end

function queries.claimed()
  local rows = {}
  local found = claim_count > 0 and call('HVALS', PREFIX .. 'claims') or {}
  for _, value in ipairs(found) do
    local claim = readable(value)
    local is_here = claim[claims.FIELD.RESERVED] and claims.node_of(claim)
    for i, reserved in ipairs(is_here and claim[claims.FIELD.RESERVED] or {}) do
      if reserved > 0 then
        rows[#rows + 1] = {claim[claims.FIELD.NODE], claim[claims.FIELD.RESOURCES][2 * i - 1], reserved}
      end
    end
  end
  return rows
end

function queries.gangs()
  local rows = {}
  for i, entry in ipairs(call('ZRANGE', PREFIX .. 'gang-leases', 0, -1)) do
    rows[i] = {string.match(entry, '^([^|]*)|(.*)$')}
  end
  return rows
end

function queries.waiting_gangs()
  local rows = {}
  for i, entry in ipairs(call('ZRANGE', PREFIX .. 'gang-waiting', 0, -1)) do
    rows[i] = {string.match(entry, '^([^|]*)|[^|]*|(.*)$')}
  end
  return rows
end

function queries.fair_share()
  local entitlements = {}
  local found = call('HGETALL', PREFIX .. 'entitlements')
  for i = 1, #found, 2 do
    local entitlement = readable(found[i + 1])
    if entitlement[3] then
      entitlements[#entitlements + 1] =
        {found[i], entitlement[1] == 1, entitlement[2], entitlement[3] == 1}
    end
  end
  return {fair.total_of(), call('HGETALL', PREFIX .. 'used-cores'), call('HGETALL', PREFIX .. 'used-mib'),
    entitlements}
end

return encode(queries[ARGS[1]]())
