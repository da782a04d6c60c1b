-- Taking back: what is under way, what was done, and how namespaces' budgets stand. Arguments:
--   'open', id, text, claim ({pod, node, uuids, resources, namespace,  answers whether it is begun
--                     what the pod takes (see TAKES)} or false)
--   'save', id, version read, text, lines                              whether it was that version
--   'close', id, version read, pod whose claim ends ('': none)         the same
--   'read', milliseconds from which on lines are told                  answers takings {id, version,
--                                     text, whether its claim is there}, lines, standings
--   'stand', namespace, at, text, whether it has no budget left, share, keep the newest
--                     whether its new pods wait
--   'lead', who, milliseconds                                          whether they lead now
-- Keys beside the ledger's, which a rebuild leaves alone:
--   takings    hash    id -> {version, text}
--   lines      stream  what was evicted, for whom: the journal
--   standings  hash    namespace -> {at, text}
--   leader     string
local B = string.gsub(P, ':$', '') .. '-reclaim:'
local LINES_KEPT = 20000

local function write_lines(lines)
  for _, line in ipairs(lines) do
    call('XADD', B .. 'lines', 'MAXLEN', '~', LINES_KEPT, '*', 'l', line)
  end
end

local function is_at(id, version)
  local value = call('HGET', B .. 'takings', id)
  return value and decode(value)[1] == version
end

local function put_taking(id, version, text)
  call('HSET', B .. 'takings', id, pack({version, text}))
end

local function is_claimable(pod, name, uuids)
  local node = node_of(name)
  if not node or node[N_KNOWN] ~= 1 or lease_of(pod) or claim_of(pod) then return false end
  fetch('devices', uuids)
  for _, uuid in ipairs(uuids) do
    local device = devices[uuid]
    if not device or device[D_NODE] ~= name or device[D_ALONE] >= CLAIMED then return false end
  end
  return true
end

local function open(id, text, wanted)
  if call('HEXISTS', B .. 'takings', id) == 1 then return false end
  if wanted then
    local pod, name, uuids, resources = wanted[1], wanted[2], wanted[3], wanted[4]
    if not is_claimable(pod, name, uuids) then return false end
    if quota.on and quota.weigh(wanted[5], wanted[6]) then return false end
    local kept = {}
    for i = 1, #resources / 2 do kept[i] = 0 end
    local claim = {name, nodes[name][N_NUMBER], uuids, resources, kept}
    mark_devices(claim, true)
    keep_more(claim)
    put_claim(pod, claim)
    count_claims()
    flush('claimed')
  end
  put_taking(id, 1, text)
  return true
end

local function close(id, version, pod)
  if not is_at(id, version) then return false end
  call('HDEL', B .. 'takings', id)
  local claim = pod ~= '' and lift_claim(pod)
  if claim then
    settle_claim(pod, claim, true)
    end_claims()
    flush('claim dropped')
  end
  return true
end

local function read(since)
  local takings, lines, standings = {}, {}, {}
  local found = call('HGETALL', B .. 'takings')
  for i = 1, #found, 2 do
    local value = decode(found[i + 1])
    takings[#takings + 1] =
      {found[i], value[1], value[2], call('HEXISTS', P .. 'claims', found[i]) == 1}
  end
  for _, entry in ipairs(call('XRANGE', B .. 'lines', string.format('%.0f', since), '+')) do
    lines[#lines + 1] = entry[2][2]
  end
  for _, value in ipairs(call('HVALS', B .. 'standings')) do
    standings[#standings + 1] = decode(value)[2]
  end
  return {takings, lines, standings}
end

local function stand(namespace, at, text, is_out, share, is_held)
  local known = call('HGET', B .. 'standings', namespace)
  if not known or decode(known)[1] <= at then
    call('HSET', B .. 'standings', namespace, pack({at, text}))
    if meta[1] == '1' and fair.put_right(namespace, is_out, share, is_held) then
      raise_capacity('budget')
      call('HSET', P .. 'quota-freed', namespace, capacity)
      quota.offer(namespace, MAX_ARGS)
    end
  end
  return true
end

local function lead(who, ttl_ms)
  local known = call('GET', B .. 'leader')
  if known and known ~= who then return false end
  call('SET', B .. 'leader', who, 'PX', ttl_ms)
  return true
end

local what = A[1]
if what == 'open' then return pack(open(A[2], A[3], A[4])) end
if what == 'save' then
  if not is_at(A[2], A[3]) then return pack(false) end
  put_taking(A[2], A[3] + 1, A[4])
  write_lines(A[5])
  return pack(true)
end
if what == 'close' then return pack(close(A[2], A[3], A[4])) end
if what == 'read' then return pack(read(A[2])) end
if what == 'stand' then return pack(stand(A[2], A[3], A[4], A[5], A[6], A[7])) end
return pack(lead(A[2], A[3]))
