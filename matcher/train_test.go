// SPDX-License-Identifier: Apache-2.0

package matcher

import (
	"strings"
	"testing"
)

func TestCheckTrain(t *testing.T) {
	const ip, ip6 = "3&0xffffff00=0x08004500", "3&0xffff0000=0x86dd0000"
	for text, want := range map[string]string{
		"a: udp(7)":                                       "",
		"a: tcp(80)":                                      "",
		"a: icmp-echo":                                    "",
		"a: slmp":                                         "",
		"a: slmp6":                                        "",
		"a: match-all":                                    "",
		"a: bypass":                                       "",
		"a: 3&0xffff0000=0x81000000":                      "VLAN tag",
		"a: 3&0xffff0000=0x88a80000":                      "VLAN tag",
		"a: 3&0xffff0000=0x08060000 && 10=1":              "", // ARP, which has no trains
		"a: 9&0xffff0000=0x00070000":                      "",
		"a: 9&0x0000ffff=16":                              "rule 0 looks at",
		"a: 4&0xffff0000=0x00200000":                      "in word 4",
		"a: 6&0xffff0000=0x00200000":                      "in word 6",
		"a: 6&0x0000ffff=0x0a00":                          "",
		"a: 14&0x0000ffff=16":                             "in word 14",
		"a: 10&0xffff0000=0:0xffff0000":                   "", // to be there
		"a: 10&0xffff=0x4142":                             "in word 10",
		"a: " + ip + " && 5&0xff=17 && 10=1":              "rule 2 looks at",
		"a: " + ip + " && 5&0xff=1 && 10=1":               "", // ICMP has none
		"a: " + ip6 + " && 10=1 && 14&0xffff0000=0x70000": "",
		"a: " + ip6 + " && 15=1":                          "rule 1 looks at",
		"a: " + ip6 + " && 4&0xffff=0x100":                "in word 4",
	} {
		rs, err := ParseRuleset(text)
		if err != nil {
			t.Error(err)
			continue
		}
		switch err := rs.CheckTrain(); {
		case want == "" && err != nil:
			t.Errorf("%s: %v", text, err)
		case want != "" && (err == nil || !strings.Contains(err.Error(), want)):
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
}
