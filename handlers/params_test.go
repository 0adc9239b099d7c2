// SPDX-License-Identifier: Apache-2.0

package handlers

import (
	"encoding/json"
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"
)

type params struct {
	Port   uint16         `param:"port"`
	Level  int8           `param:"level"`
	Any    uint64         `param:"any"`
	Ratio  float64        `param:"ratio"`
	Name   string         `param:"name"`
	Loud   bool           `param:"loud"`
	Every  time.Duration  `param:"every"`
	To     netip.AddrPort `param:"to,required"`
	Ports  []uint16       `param:"ports"`
	Hidden int
}

func TestDecode(t *testing.T) {
	to := netip.MustParseAddrPort("10.0.0.2:9400")
	for _, c := range []struct {
		name string
		json string
		want params
		errs []string // parts of the error's lines
	}{
		{"defaults stay", `{"to": "10.0.0.2:9400"}`, params{Port: 7, To: to}, nil},
		{"all", `{"port": 65535, "level": -128, "any": 3, "ratio": 2.5, "name": "x", "loud": true,
			"every": "10ms", "to": "10.0.0.2:9400", "ports": [1, 2]}`,
			params{Port: 65535, Level: -128, Any: 3, Ratio: 2.5, Name: "x", Loud: true, Every: 10 * time.Millisecond, To: to, Ports: []uint16{1, 2}}, nil},
		{"a whole ratio", `{"to": "10.0.0.2:9400", "ratio": 2}`, params{Port: 7, To: to, Ratio: 2}, nil},
		{"case", `{"TO": "10.0.0.2:9400"}`, params{Port: 7, To: to}, nil},
		{"twice", `{"to": "10.0.0.2:9400", "Port": 1, "port": 2}`, params{}, []string{`param "port": appears twice`}},
		{"missing", `{}`, params{}, []string{`param "to": is missing: want text, netip.AddrPort`}},
		{"unknown", `{"to": "10.0.0.2:9400", "prt": 7}`, params{},
			[]string{`param "prt": no such parameter: want port (whole number, 0 to 65535), level (whole number, -128 to 127), any (whole number, not negative), ratio (number), name (string), loud (true or false), every (duration, such as "10s"), to (text, netip.AddrPort), ports (list of whole number, 0 to 65535)`}},
		{"hidden", `{"to": "10.0.0.2:9400", "hidden": 1}`, params{}, []string{`param "hidden": no such parameter: `}},
		{"type", `{"to": "10.0.0.2:9400", "port": "http"}`, params{}, []string{`param "port": "http": want whole number, 0 to 65535`}},
		{"range", `{"to": "10.0.0.2:9400", "port": 65536, "level": -129}`, params{}, []string{`"port": 65536: want`, `"level": -129: want`}},
		{"negative", `{"to": "10.0.0.2:9400", "any": -1}`, params{}, []string{`"any": -1: want whole number, not negative`}},
		{"fraction", `{"to": "10.0.0.2:9400", "port": 1.5}`, params{}, []string{`"port": 1.5: want`}},
		{"a number for a duration", `{"to": "10.0.0.2:9400", "every": 10}`, params{}, []string{`"every": 10: want duration`}},
		{"text", `{"to": "10.0.0.2"}`, params{}, []string{`param "to": "10.0.0.2": want text, netip.AddrPort: not an ip:port`}},
		{"null", `{"to": null}`, params{}, []string{`param "to": nothing: want`}},
		{"entry", `{"to": "10.0.0.2:9400", "ports": [1, "x"]}`, params{}, []string{`param "ports": entry 2: "x": want`}},
		{"no list", `{"to": "10.0.0.2:9400", "ports": 1}`, params{}, []string{`param "ports": 1: want list`}},
		{"a bool", `{"to": "10.0.0.2:9400", "loud": "yes"}`, params{}, []string{`"yes": want true or false`}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var p Params
			if err := json.Unmarshal([]byte(c.json), &p); err != nil {
				t.Fatal(err)
			}
			before := len(p)
			got := params{Port: 7}
			err := p.Decode(&got)
			if len(p) != before {
				t.Error("the parameters have changed")
			}
			if c.errs == nil {
				if err != nil || !reflect.DeepEqual(got, c.want) {
					t.Errorf("%+v, %v, want %+v", got, err, c.want)
				}
				return
			}
			if err == nil {
				t.Fatalf("no error: %+v", got)
			}
			lines := strings.Split(err.Error(), "\n")
			if len(lines) != len(c.errs) {
				t.Errorf("%d errors, want %d:\n%v", len(lines), len(c.errs), err)
			}
			for _, part := range c.errs {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("error\n%v\ndoes not say %q", err, part)
				}
			}
		})
	}
}

// TestDecodeYAML decodes what YAML makes of numbers: ints, not floats.
func TestDecodeYAML(t *testing.T) {
	got := params{}
	err := Params{"port": 7, "level": int64(-3), "any": uint64(1 << 63), "to": "[::1]:1", "ratio": 1}.Decode(&got)
	want := params{Port: 7, Level: -3, Any: 1 << 63, To: netip.MustParseAddrPort("[::1]:1"), Ratio: 1}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, %v, want %+v", got, err, want)
	}
}

func TestDecodeInto(t *testing.T) {
	if err := (Params{}).Decode(params{}); err == nil {
		t.Error("a struct that is no pointer was taken")
	}
	var odd struct {
		F func() `param:"f"`
	}
	if err := (Params{"f": 1}).Decode(&odd); err == nil {
		t.Error("a field that is a func was set")
	}
	if err := (Params{"x": 1}).Decode(&struct{}{}); err == nil || !strings.Contains(err.Error(), "there are none") {
		t.Error(err)
	}
}
