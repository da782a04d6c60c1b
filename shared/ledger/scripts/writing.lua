-- Writing everything that changed, once, at the end of a script.

-- Forget the touched nodes that are gone and hold nothing. Fences go on from the highest forgotten.
local function drop_gone()
  for name in pairs(changed_nodes) do
    local node = nodes[name]
    if node and node[N_KNOWN] == -1
      and call('ZCOUNT', P .. 'on', node[N_NUMBER], node[N_NUMBER]) == 0 then
      local uuids = uuids_on(name)
      fetch('devices', uuids)
      for _, uuid in ipairs(uuids) do
        local device = devices[uuid]
        if device and device[D_NODE] == name then
          floor = math.max(floor, device[D_FENCE])
          devices[uuid] = false
          call('HDEL', P .. 'devices', uuid)
        end
      end
      nodes[name], freed[name] = false, nil
      call('DEL', P .. 'facts:' .. name)
      call('HDEL', P .. 'nodes', name)
      call('ZREM', P .. 'freed', name)
    end
  end
end

local function write(command, key, parts)
  for from = 1, #parts, MAX_ARGS do
    call(command, P .. key, unpack(parts, from, math.min(from + MAX_ARGS - 1, #parts)))
  end
end

local flush
do
-- Pack what changed: names with values to be written, and all values joined, each of which says
-- where it ends.
local function values_of(changed, cache, value_of)
  local parts, told = {}, {}
  for name in pairs(changed) do
    local thing = cache[name]
    if thing then
      local value = value_of(thing)
      parts[#parts + 1] = name
      parts[#parts + 1] = value
      told[#told + 1] = value
    end
  end
  return parts, table.concat(told)
end

local function append_feed(cause, told_nodes, told_devices)
  local entry = {'e', epoch, 'c', capacity, 'w', cause, 'n', told_nodes, 'd', told_devices}
  local function add(key, value)
    entry[#entry + 1] = key
    entry[#entry + 1] = value
  end
  for name, told in pairs(inventories) do
    if told then
      local facts = call('HMGET', P .. 'facts:' .. name, 'facts', 'devices', 'served')
      add('f' .. name, facts[1] or '')
      add('g' .. name, facts[2] or '[]')
      add('s' .. name, told_served(name, facts[3]))
    else
      add('x' .. name, '')
    end
  end
  if told_nodes ~= '' or told_devices ~= '' or #entry > 10 then
    feed = feed + 1
    call('XADD', P .. 'feed', 'MAXLEN', '~', ARGV[4], string.format('%.0f-0', feed), unpack(entry))
  end
end

-- Write everything. `cause` says in the feed what happened.
function flush(cause)
  if next(freed) then capacity = capacity + 1 end
  local version = next_version()
  for name in pairs(changed_nodes) do
    if nodes[name] then nodes[name][N_VERSION] = version end
  end
  local node_parts, told_nodes = values_of(changed_nodes, nodes, node_value)
  local device_parts, told_devices = values_of(changed_devices, devices, device_value)
  append_feed(cause, told_nodes, told_devices)
  write('HSET', 'nodes', node_parts)
  write('HSET', 'devices', device_parts)
  write('HSET', 'leases', written)
  write('ZADD', 'on', on)
  write('ZADD', 'ganged', joining)
  for at, pods in pairs(due) do call('ZADD', P .. 'due', at, pack({seq, pods})) end
  for name in pairs(freed) do call('ZADD', P .. 'freed', capacity, name) end
  if grown then call('HSET', P .. 'ledger', 'grown', capacity) end
  if seq ~= first_seq or capacity ~= first_capacity then
    call('HSET', P .. 'ledger', 'seq', seq, 'capacity', capacity, 'feed', feed, 'floor', floor,
      'numbered', numbered)
  end
  fair.write(inventories)
  if quota.on then quota.write() end
end
end

-- Nothing was freed, but pods may be placed that could not: mirrors hear of it, so that no verdict of
-- before counts as one of after.
local function raise_capacity(cause)
  capacity, feed = capacity + 1, feed + 1
  call('HSET', P .. 'ledger', 'capacity', capacity, 'feed', feed)
  call('XADD', P .. 'feed', 'MAXLEN', '~', ARGV[4], string.format('%.0f-0', feed),
    'e', epoch, 'c', capacity, 'w', cause, 'n', '', 'd', '')
end
