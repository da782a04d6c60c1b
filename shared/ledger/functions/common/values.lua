-- Lists, sets and packed values.
local decode = cmsgpack.unpack
local M = {}

function M.append(list, ...)
  for i = 1, select('#', ...) do list[#list + 1] = (select(i, ...)) end
end

function M.set_of(list)
  local set = {}
  for _, name in ipairs(list) do set[name] = true end
  return set
end

-- For each pair of a flat list, its two values.
function M.each_pair(flat)
  local i = -1
  return function()
    i = i + 2
    return flat[i], flat[i + 1]
  end
end

-- The record that was packed with this layout, or nil if it is missing or cannot be decoded.
function M.record(value, layout)
  if not value then return nil end
  local is_read, record, more = pcall(decode, value)
  if is_read and more == nil and M.has_types(record, layout.TYPES) then return record end
end

-- Whether what was decoded is an array of as many values, of which the first and the last have these types: all would
-- take too long, and what damages one value changes how many follow.
function M.has_types(record, types)
  local last = #types
  return type(record) == 'table' and #record == last and type(record[1]) == types[1]
    and type(record[last]) == types[last]
end

-- What was packed, or as JSON; {} if it is missing or cannot be read.
function M.readable(value, parse)
  if not value then return {} end
  local is_read, content = pcall(parse or decode, value)
  return is_read and type(content) == 'table' and content or {}
end

return M
