-- Whose turn it is among namespaces whose pods wait: the one that holds the smallest dominant part of
-- all healthy devices, divided by its share. Kept up as leases come and go, so that no pod is looked at.
--   taken-cores, taken-mib   hashes  namespace -> what its live leases take
--   sizes     hash   node -> {cores, MiB} of its healthy devices
--   ledger    total-cores, total-mib: of all of them; relined: '0' when all lines must be written anew
--   rights    hash   namespace -> {0: it has budget left, 1: it has not; its share; 1: its budget keeps
--             new pods waiting}
--   queue:NAMESPACE|GROUP    zset  order|pod, all of score 0: highest priority first, then oldest
--   line:GROUP      zset  position|namespace, all of score 0: the queues of a group, by whose turn it is
--   lined:NAMESPACE hash  group -> what stands in the line for it
local fair = {taken = {}, added = {}, rights = {}, unit = 1}
do -- A script may have 200 local names.
local PARTS = 1e9

function fair.total_of()
  if not fair.total then
    local found = call('HMGET', P .. 'ledger', 'total-cores', 'total-mib')
    fair.total = {math.max(1, tonumber(found[1] or 0)), math.max(1, tonumber(found[2] or 0))}
  end
  return fair.total
end

local function taken_by(namespace)
  if not fair.taken[namespace] then
    fair.taken[namespace] = {
      tonumber(call('HGET', P .. 'taken-cores', namespace) or 0),
      tonumber(call('HGET', P .. 'taken-mib', namespace) or 0),
    }
  end
  return fair.taken[namespace]
end

local function right_of(namespace)
  if not fair.rights[namespace] then
    local value = call('HGET', P .. 'rights', namespace)
    fair.rights[namespace] = value and decode(value) or {0, 1, 0}
  end
  return fair.rights[namespace]
end

-- What sorts a pod before others: whether its namespace has budget left, its rank, and the dominant
-- part that the namespace holds, with `more` {cores, MiB}, divided by its share. The same as
-- shared.model.fair_share.
function fair.prefix(namespace, rank, more)
  local right, taken, total = right_of(namespace), taken_by(namespace), fair.total_of()
  local cores, mib = taken[1], taken[2]
  if more then cores, mib = cores + more[1], mib + more[2] end
  local part = math.max(cores / total[1], mib / total[2]) / right[2]
  return string.format('%d%s:%015.0f', right[1], rank, math.min(PARTS * part, 1e14))
end

-- The position of a waiting pod; of equal ones the oldest comes first.
function fair.position(namespace, order, more)
  return fair.prefix(namespace, string.sub(order, 1, 10), more) .. ':' .. string.sub(order, 12, 25)
end

function fair.queue(namespace, group)
  return P .. 'queue:' .. namespace .. '|' .. group
end

-- Write anew where the queue stands in its group's line.
function fair.reline(namespace, group)
  local lined, line = P .. 'lined:' .. namespace, P .. 'line:' .. group
  local before = call('HGET', lined, group) or nil
  local first = call('ZRANGE', fair.queue(namespace, group), 0, 0)[1]
  local now = first and fair.position(namespace, first) .. '|' .. namespace
  if before == now then return end
  if before then call('ZREM', line, before) end
  if now then
    call('ZADD', line, 0, now)
    call('HSET', lined, group, now)
  else
    call('HDEL', lined, group)
  end
end

function fair.reline_namespace(namespace)
  for _, group in ipairs(call('HKEYS', P .. 'lined:' .. namespace)) do
    fair.reline(namespace, group)
  end
end

function fair.reline_all()
  for _, group in ipairs(call('HKEYS', P .. 'groups')) do
    for _, entry in ipairs(call('ZRANGE', P .. 'line:' .. group, 0, -1)) do
      fair.reline(string.match(entry, '|(.*)$'), group)
    end
  end
  call('HSET', P .. 'ledger', 'relined', '1')
end

function fair.is_held(namespace)
  return right_of(namespace)[3] == 1
end

-- Answers whether new pods of the namespace need wait for its budget no longer.
function fair.put_right(namespace, is_out, share, is_held)
  local value = pack({is_out and 1 or 0, math.max(1, share), is_held and 1 or 0})
  if call('HGET', P .. 'rights', namespace) == value then return false end
  local was_held = fair.is_held(namespace)
  call('HSET', P .. 'rights', namespace, value)
  fair.rights[namespace] = nil
  fair.reline_namespace(namespace)
  return was_held and not is_held
end

-- As budgets stand, which a rebuild leaves alone (takings.lua).
function fair.read_rights()
  local found = call('HGETALL', string.gsub(P, ':$', '') .. '-reclaim:standings')
  for i = 1, #found, 2 do
    local told = parse(decode(found[i + 1])[2])
    fair.put_right(found[i], told.lease_class ~= 'guaranteed', told.share or 1,
      (told.new_pods or 'admit') ~= 'admit')
  end
end

-- Count a lease of the namespace (sign 1) or take it out again (sign -1).
function fair.count(namespace, takes, sign)
  local cores, mib = 0, 0
  for h = TAKES, takes[2], HOLD do
    cores = cores + (takes[h + 5] == ALONE and 100 or takes[h + 2])
    mib = mib + takes[h + 1]
  end
  fair.add(namespace, sign * cores, sign * mib)
end

function fair.add(namespace, cores, mib)
  local added = fair.added[namespace]
  if not added then
    added = {0, 0}
    fair.added[namespace] = added
  end
  added[1], added[2] = added[1] + cores, added[2] + mib
end

-- What the node's healthy devices come to.
local function size_of(name)
  local node, cores, mib = node_of(name), 0, 0
  for _, uuid in ipairs(node and node[N_KNOWN] == 1 and uuids_on(name) or {}) do
    local device = device_of(uuid)
    if device and device[D_OK] == 1 and device[D_NODE] == name then
      cores, mib = cores + 100, mib + device[D_MEMORY]
    end
  end
  return cores, mib
end

local function measure(name)
  local value = call('HGET', P .. 'sizes', name)
  local before, cores, mib = value and decode(value) or {0, 0}, size_of(name)
  if cores == before[1] and mib == before[2] then return end
  if cores > 0 then
    call('HSET', P .. 'sizes', name, pack({cores, mib}))
  else
    call('HDEL', P .. 'sizes', name)
  end
  call('HINCRBY', P .. 'ledger', 'total-cores', string.format('%.0f', cores - before[1]))
  call('HINCRBY', P .. 'ledger', 'total-mib', string.format('%.0f', mib - before[2]))
  call('HSET', P .. 'ledger', 'relined', '0')
  fair.total = nil
end

local function raise(key, namespace, amount)
  if call('HINCRBY', P .. key, namespace, string.format('%.0f', amount)) == 0 then
    call('HDEL', P .. key, namespace)
  end
end

function fair.write(names)
  for name in pairs(names) do measure(name) end
  for namespace, added in pairs(fair.added) do
    raise('taken-cores', namespace, added[1])
    raise('taken-mib', namespace, added[2])
    fair.taken[namespace], fair.added[namespace] = nil, nil
    fair.reline_namespace(namespace)
  end
end
end
