-- Leases of ResourceClaims. Unlike that of a pod, the uid of a claim may get a lease again. Leases are `deallocated` at
-- the version that was read: like those of vanished pods they end once their node's agent confirms that the claim is
-- not prepared. For new `consumers`, ARGV[5] is the lease that has them.
local actions = {}

function actions.deallocated(rows)
  local marked = {}
  fetch_leases_of(rows)
  for i, row in ipairs(rows) do
    local value = leases[row[1]]
    marked[i] = value and header_of(value)[L_VERSION] == row[2] or false
    if marked[i] then call('SADD', PREFIX .. 'vanished', row[1]) end
  end
  return encode(marked)
end

function actions.consumers(claim, version)
  local value = lease_of(claim)
  local header = value and header_of(value)
  if not header or header[L_VERSION] ~= version or #ARGV[5] > MOST_LEASE_BYTES then
    return {encode(false)}
  end
  header[L_DESCRIPTION_BYTES], header[L_VERSION] = header_of(ARGV[5])[L_DESCRIPTION_BYTES], next_version()
  value = put_header(claim, header, ARGV[5])
  write_changes('consumers')
  return {encode(true), value}
end

return actions[ARGS[1]](unpack(ARGS, 2))
