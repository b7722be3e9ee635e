"""Made-up prompts for training the task classifier: how people ask, over many wordings, in English and Chinese.

Collected prompts come from few sources, and a source words its instruction in one or two ways: a classifier trained on
them alone learns the sources. These patterns say the same in other words. Slots: {text} a passage, {s} a sentence, {t} a
topic, {p} a person, {l} a language, {n} a number, {x} and {y} things, {q} a question about a passage.
"""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_TOPICS = r"""climate change|the Roman Empire|electric cars|black holes|coffee|the French Revolution|machine learning|sleep|bees
the stock market|vaccines|photosynthesis|volcanoes|remote work|chess|jazz music|the moon|inflation|antibiotics|ocean currents
renewable energy|the Silk Road|mental health|football|architecture|quantum computers|blockchain|whales|migration|democracy
gravity|the internet|glaciers|nutrition|tourism|public transport|dinosaurs|the immune system|Shakespeare|urban planning
a lost dog|two old friends|a lighthouse|a time traveller|first love|a robot that dreams|a haunted house|a small village|autumn
friendship|a coffee shop|the last day of school|a dragon|a detective|the sea|a train at night|a new product|a charity run"""
_THINGS = r"apples|pens|books|tickets|marbles|cookies|chairs|flowers|boxes|eggs|stamps|toys|bottles|cards|trees|shirts|cupcakes|bags of rice"
_PEOPLE = r"Tom|Maria|Ahmed|Julia|Wei|Priya|Sam|Olivia|Carlos|Hannah|Mr. Lee|Mrs. Brown|a farmer|a baker|a teacher|the shopkeeper"
_LANGUAGES = (
    r"German|French|Spanish|Italian|Chinese|Japanese|Russian|Portuguese|Korean|Arabic|Dutch|Polish|English"
)
_QUESTIONS = r"""When did this happen?|Who is the main person?|Why did they do that?|Where did it take place?|What was the result?
How many people were involved?|What is the name of the place?|Which of them came first?|What does the author mean?|How did it end?
What did he say about it?|Who wrote it?|What happened afterwards?|Which company is meant?|What year was it built?"""
_MESSAGES = r"""I still have not received my parcel|my card was declined at the shop today|how do I reset my password|I was charged twice this month
why is my transfer still pending|I want to close my account|the app crashes when I open it|can I change my delivery address
is there a fee for withdrawing cash abroad|someone used my card without my permission|when will I get my refund|I can't log in any more
this is the best phone I have ever had|the food was cold and the waiter rude|a dull film with two good scenes|great value, arrived early
where is the nearest cash machine that takes my card|what exchange rate do you use|my top up did not go through|do you have an age limit"""
_SENTENCES = r"""The meeting was moved from Monday to Friday because several people were ill .|He walked to the station and took the last train home.
She was born in Vienna in 1921 and moved to London as a child , where she studied music and later taught at a school .
The river rises in the hills north of the town and flows south through three lakes before it reaches the sea .
The company , which was founded in 1987 by two engineers , sold its first machine a year later and now has 300 employees .
Although it was raining, the children wanted to play outside, and their mother let them go.|hey can u send me the file asap thx
The president said on Tuesday that the government would not change its plans.|More than 200 people were evacuated after the flood.
The album was recorded in Dublin by Anna Kelly and released in 2004 on Sunrise Records .|Their house is at the end of the street.
Police have arrested a man after a fire in a warehouse on Saturday evening.|I has went to the market yesterday for buying vegetables.
Researchers at the University of Toronto have found a new way to store energy in salt .|The new law comes into force next year."""
_PASSAGES = r"""The old bridge across the Laren was opened in 1932. It was built by the engineer Karl Bode and cost two million marks. In 1978 it was closed to cars, and since then only cyclists and people on foot may use it. Every summer the town holds a market on it, and thousands of visitors come.
A new study suggests that people who sleep less than six hours a night catch colds more often. The scientists followed 164 adults for two months and measured their sleep with a watch. Those who slept least were four times as likely to fall ill, whatever their age, stress or smoking habits. The authors call for more attention to sleep in public health.
LONDON, England -- The government announced on Thursday that rail fares will rise by three percent in January. Passenger groups reacted with anger. "People pay more every year and stand in crowded trains," a spokeswoman said. The minister defended the decision and pointed to new trains that will be delivered by 2026. The opposition asked for a freeze of all fares.
Coral reefs cover less than one percent of the sea floor, yet a quarter of all marine species live there. Rising temperatures make corals lose the algae that feed them. The corals turn white and may die if the water does not cool soon. Some reefs recover within ten years; others are overgrown by seaweed.
Elena Marsh ( born 4 May 1951 in Leeds ) is a British painter and printmaker . She studied at the Royal College of Art and won the Hallam Prize in 1984 . Her works are held by museums in London , Oslo and Toronto . She lives in Cornwall with her husband , the poet David Ross .
Anna and Ben went to the lake with a thermometer each. Anna measured near the shore, where the water was shallow, and Ben in the middle. Warm water is lighter than cold water and stays at the top. In the evening they compared what they had written down."""
_ZH_TOPICS = r"人工智能|春天|环境保护|友谊|健康饮食|乡村生活|科技发展|时间管理|太空旅行|中秋节|母爱|电动汽车|网络安全|全球变暖|读书|一只小猫|孤独的老人|未来的城市|新款手机|长城|咖啡|足球|光合作用|区块链|睡眠"
_ZH_SENTENCES = r"""我们昨天去了公园，天气非常好，大家都很开心。|这家公司成立于1998年，总部设在上海，现有员工三千多人。|他决定明天早上坐飞机去北京参加会议。
这部电影情节紧凑，演员的表演也十分出色。|酒店房间很脏，服务员的态度也很差，我不会再来了。|李明于2015年毕业于清华大学，现在在杭州的一家软件公司工作。
因为下雨，所以运动会被推迟到了下周。|科学家发现，每天步行三十分钟可以降低患心脏病的风险。|请问我的快递什么时候能到？|小狗在院子里追着蝴蝶跑来跑去。"""
_ZH_PASSAGES = r"""随着城市的快速发展，交通拥堵已经成为许多大城市面临的共同问题。专家认为，发展公共交通、鼓励绿色出行是缓解拥堵的有效途径。去年，该市新开通了三条地铁线路，日均客流量增加了百分之二十。市民普遍反映出行更加方便，但早晚高峰仍然拥挤。
王芳，1972年生于江苏南京，著名作家。1995年毕业于北京大学中文系，后在报社担任记者。2003年出版第一部长篇小说《河边》，获得多项文学奖。她的作品多以普通人的生活为题材，语言朴素，深受读者喜爱。
茶叶起源于中国，已有数千年的历史。根据制作方法的不同，茶可以分为绿茶、红茶、乌龙茶、白茶、黄茶和黑茶六大类。研究表明，适量饮茶有助于提神醒脑，但空腹时不宜饮用浓茶。"""
_CODE = r"""def total(items):\n    result = 0\n    for item in items:\n        result += item.price\n    return result
for (let i = 0; i <= list.length; i++) {\n  console.log(list[i].name);\n}
public class Main {\n    public static void main(String[] args) {\n        int[] a = new int[3];\n        System.out.println(a[3]);\n    }\n}
#include <stdio.h>\nint main() {\n    int n;\n    scanf("%d", n);\n    printf("%d", n * 2);\n}
import pandas as pd\ndf = pd.read_csv("data.csv")\nprint(df.groupby("city").mean())
SELECT name, COUNT(*) FROM users JOIN orders ON users.id = orders.user_id GROUP BY name;
<div class="box"><p>Hello</p></div>\n<style>.box { display: flex; }</style>"""
_TABLES = r"""CREATE TABLE customers (id INTEGER, name TEXT, city TEXT);\nCREATE TABLE orders (id INTEGER, customer_id INTEGER, total REAL, day DATE);
CREATE TABLE author (aid bigint, name text, homepage text);\nCREATE TABLE writes (aid bigint, pid bigint);
tables: employees(id, name, salary, dept_id), departments(id, name)"""
_SCHEMAS = r"""{"type": r"object", "properties": {"name": {"type": r"string"}, "age": {"type": r"integer"}}, "required": ["name"]}
{"title": r"Order", "type": r"object", "properties": {"items": {"type": r"array", "items": {"type": r"string"}}, "total": {"type": r"number"}}}
{"$schema": r"http://json-schema.org/draft-07/schema#", "type": r"object", "properties": {"city": {"type": r"string"}, "temperature": {"type": r"number"}}}"""
_TOOLS = r"""[{"name": r"get_weather", "description": r"Current weather of a city.", "parameters": {"type": r"object", "properties": {"city": {"type": r"string"}}, "required": ["city"]}}]
[{"name": r"book_flight", "parameters": {"from": {"type": r"string"}, "to": {"type": r"string"}, "date": {"type": r"string"}}}, {"name": r"cancel_flight", "parameters": {"id": {"type": r"string"}}}]
{"name": r"calculate_area", "description": r"Area of a shape", "parameters": {"type": r"dict", "properties": {"base": {"type": r"integer"}, "height": {"type": r"integer"}}}}"""
_CHOICES = r"""- river\n - desk\n - kitchen\n - sky\n - garden|(A) faster (B) slower|A. the first one\nB. the second one\nC. neither|- they were tired\n- they were late\n- none of the above
(a) wood (b) metal|- heat\n - light\n - sound\n - rain\n - wind"""
_NUMBER_CHOICES = r"""A)12\nB)15\nC)18\nD)20\nE)24|A. 3/4\nB. 1/2\nC. 2/3\nD. 5/6|(a) 120 km (b) 150 km (c) 180 km (d) None of these|A) $40 B) $45 C) $50 D) $60"""
_LABELS = r"""positive, negative or neutral|sports, politics, business or science|spam or not spam|billing, delivery, account, other|toxic or not toxic
company, artist, athlete, place, animal, plant, album, film|refund request, complaint, praise|joy, anger, sadness, fear|true or false|yes or no"""

_ENGLISH: dict[str, str] = {
    "summarization": r"""Summarize the following text: {text}|Please summarise this article in three sentences.\n\n{text}|{text}\n\nTL;DR
Give me a short summary of the text below.\n{text}|{text}\n\nIn a few sentences, what is this about?|Write an abstract for this report: {text}
What are the main points of this article?\n\n{text}|{text}\n\nSum up the passage above in one paragraph.|Condense this into bullet points: {text}
{text}\n\nWrite highlights for this article.|Boil this down to the essentials: {text}|Provide a brief overview of the following document.\n\n{text}
{text}\n===\nShort version:|Can you give me the gist of this?\n{text}|Shorten this news story to its key facts:\n{text}|Make a headline and two-line summary of: {text}
{text}\n\nSummarize the above.|Read the article and write a summary of no more than 50 words.\n{text}|List the key takeaways of this text.\n\n{text}|{text}\nThis text in one sentence:""",
    "translation": r"""Translate to {l}: {s}|Translate the following sentence from English into {l}.\n{s}|How do you say "{s}" in {l}?|{s}\n\nTranslate this into {l}.
What is the {l} translation of: {s}|Please translate this paragraph into {l}:\n\n{text}|Give me the {l} version of this text: {s}|{l} translation of the text below\n{s}
Put this into {l}: {s}|Translate English to {l}: {s}|I need this in {l}, please: {s}|Übersetze ins Deutsche: {s}|Traduce al español: {s}|Traduisez en français : {s}
You are a translator. Render the user's text in {l}.\n{s}|{s}\nIn {l}:|Write the following in {l}: {s}""",
    "rewriting": r"""Rewrite this sentence: {s}|Rephrase: {s}|Paraphrase the following: {s}|Say this in other words: {s}|{s}\n\nRewrite the text above in simpler words.
Make this sound more professional: {s}|Correct the grammar and spelling: {s}|Fix the mistakes in this sentence.\n{s}|Simplify: {s}|Make this shorter without changing the meaning: {s}
Split this sentence into two: {s}|Turn this into two shorter sentences.\n{s}|Edit the following paragraph for clarity: {text}|Polish my text: {text}|Reword this so that it is more formal.\n{s}
Change the tone of this email to friendly: {s}|Convert this sentence to passive voice: {s}|{s}\nRestate it in a different way.|Improve the style of this paragraph.\n\n{text}
{s}\n\nHow could this sentence be reworded?|Proofread: {s}|Break up the long sentence below into simpler ones.\n{s}|Rewrite in plain English: {s}|Rewrite the text from the first person: {s}
{s}\n\nMake it easier to read.|Put this sentence into the past tense: {s}|Express the same thing more concisely: {s}|Remove the jargon from this: {s}""",
    "extraction": r"""Extract all names from the text: {text}|List the people mentioned in this passage.\n{text}|Find all dates in the following text.\n\n{text}|{text}\n\nWhich organisations are named above? List them.
Pull out the key facts from this text: {text}|Identify the named entities in: {s}|{s}\nList every location in the sentence.|What are the keywords of this text? {text}
Get the name, date of birth and occupation from this bio: {text}|Extract the email addresses and phone numbers from the message: {s}|Find the sentence that mentions money.\n{text}
Mark all persons, places and companies in the text below.\n{s}|Name the things this sentence is about: {s}|Write down all numbers that appear in the text: {text}|{s}\n\nName the entities with their types.
From the text, give the details about the person: birth place, career, awards.\n\n{text}|Tag the entities: {s}|Copy all quotations from the article.\n{text}|Retrieve the following information from the text: name, place, year.\n{text}
Collect what the text says about {p}.\n\n{text}|Pick out the product names: {s}|List all the nouns in: {s}|Which subjects come up here: {s}|Fill in these fields from the text:\n- name\n- birth date\n- occupation\n\n{text}""",
    "classification": r"""Classify this message: {m}|What is the sentiment of this review? {m}|Is this text {b}?\n{m}|Label the text as {b}: {m}|{m}\n\nCategory ({b}):|Which of these categories fits best: {b}?\n{m}
What is the intent of the customer in this message?\n{m}|{m}\nWhat topic does this question belong to?|Decide whether the review is positive or negative.\nReview: {m}|Assign one of the labels {b} to the following.\n{text}
Do these two sentences mean the same?\n1. {s}\n2. {s}\nAnswer yes or no.|Sentence 1: {s}\nSentence 2: {s}\nIs sentence 2 a paraphrase of sentence 1?|Does the first sentence imply the second? {s} {s} True, false or neither?
{s}\nIs that the same as saying: {s}? Yes or no.|Categorize this ticket: {m}|Possible classes: {b}. Which one describes this?\n{text}|Detect the emotion: {m}|Is the following message spam?\n{m}
Route this customer request to a department.\n\n{m}|What kind of query is this? "{m}"|Determine the topic of the article: {b}.\n\n{text}|Is this statement true or false: {s}|Tell me which class this belongs to: {m} Options: {b}
Tag the support request with an intent: {m}|Find out whether the tone is friendly or hostile: {m}|Sort these into groups: apple, carrot, banana, onion|Rate the sentiment of the tweet from 1 to 5: {m}""",
    "creative_writing": r"""Write a story about {t}.|Write a poem about {t}|Compose a song about {t}.|Tell me a short tale about {t}|Write a blog post about {t}.|Draft an email to my landlord about {t}.|Write a funny dialogue between {p} and {p}.
Make up a film about {t}.|Work this up into a story: {s}|Come up with a slogan for {t}|Write an essay about {t}.|Write the opening scene of a novel about {t}|Continue this story: {s}|Write a product description for {t}
Write a cover letter for a job as a designer.|Write a haiku on {t}|Invent a fairy tale with {p} and {t}.|Write a speech for the wedding of {p}|write a fanfic where {p} meets {p}|Write a screenplay: {p} enters a bar and sees {t}.
Write a rap battle between {p} and {p}|Make up a bedtime story for a five-year-old about {t}.|Write an advertisement for {t}.|Write a review of a film about {t}|Write a letter of recommendation for {p}.|Write a comedic monologue about {t}
Describe a scene in which {p} finds {t}. Use vivid language.|Write a chapter of an alternate history in which {t} changes everything.|Think up ten names for a fantasy kingdom.|Write a persuasive article on {t}|Create a character backstory: {p}, who loves {t}
write a scene of {p} and {p} arguing about {t}, with lots of dialogue|Write an article about {t} in a humorous tone|Compose a limerick on {t}.|Напиши рассказ про осень|Напиши смешное стихотворение|Schreibe eine Geschichte über {t}""",
    "code": r"""Write a Python function that returns the sum of a list.|Write a function to find the longest common prefix of two strings.|Write a program that prints the first {n} prime numbers.|Fix the bug in this code:\n```\n{c}\n```
What does this code do?\n{c}|{c}\n\nWhy do I get an error here?|Refactor this: {c}|{c}\n\nAdd comments and type hints.|How do I read a CSV file in pandas?|Implement a binary search tree in Java.|Write a SQL query that lists all customers with more than {n} orders.\n\n{d}
{d}\n\nQuestion: what is the average total by city? Write the SQL.|Given the schema below, which query answers: who has the most orders?\n{d}|Write a regex that matches an email address.|Explain how to centre a div in CSS.|Convert this to TypeScript:\n{c}
Write a bash script that renames all files in a folder.|Write unit tests for the following function.\n{c}|def add(a, b):\n    \"\"\"Return the sum of a and b.\n    >>> add(1, 2)\n    3\n    \"\"\"\n|from typing import List\n\ndef largest(numbers: List[int]) -> int:\n    \"\"\" Largest of the numbers. \"\"\"\n
Create a React component with a login form.|How can I make this loop faster?\n{c}|Write a Dockerfile for a flask app|make a snake game in javascript|I get "segmentation fault" with this program:\n{c}|Optimize this query: SELECT * FROM t WHERE x > {n};|Show me how to call a REST API in Go.
Write an algorithm to sort a linked list in O(n log n).|Write a python function to check whether a number is odd. assert is_odd({n}) == True|Complete the function:\n{c}|Write a VBA macro that copies a sheet|Design a class for a bank account in C++.|You are given an array of integers nums. Return the indices of two numbers that add up to target.
Напиши код на python для бота|Explain the difference between a list and a tuple in Python|how do i undo a git commit|Write a kubernetes deployment yaml for nginx|Use matplotlib to plot a histogram of the column age.|Build a chrome extension that blocks ads|Write a C program to reverse a string.""",
    "math_reasoning": r"""{p} has {n} {x} and buys {n} more. How many {x} does {p} have now?|A train travels {n} km in {n} hours. What is its average speed?|Solve for x: {n}x + {n} = {n}|What is {n}% of {n}?|{p} bought {n} {x} at ${n} each and {n} {y} at ${n} each. How much did {p} spend in total?
Find the derivative of x^{n} + {n}x.|If {n} workers build a wall in {n} days, how long do {n} workers need?\n{o}|The sum of two numbers is {n} and their difference is {n}. What are the numbers?\n{o}|Calculate the area of a circle with radius {n}.|{p} is twice as old as {p}. In {n} years the sum of their ages will be {n}. How old is {p} now?
Prove that the square root of 2 is irrational.|What is the probability of rolling two sixes?|Evaluate the integral of sin(x) from 0 to pi.|{p} reads {n} pages a day. How many days does it take to read {n} pages?|The price of a shirt is reduced by {n}%. The new price is ${n}. What was the original price?\n{o}
Each box holds {n} {x}. {p} fills {n} boxes every hour. How many {x} are packed in {n} hours?|Half of the {x} are red, a third of the rest are blue. If there are {n} blue ones, how many {x} are there?|Find all real solutions of x^2 - {n}x + {n} = 0.|A rectangle is {n} cm long and {n} cm wide. What is its perimeter?
Let $f(x) = x^2 + {n}$. Compute $f({n})$.|In how many ways can {n} people sit in a row?\n{o}|{p} saves {n} dollars per week. How much money will be left after {n} weeks if {p} spends {n} dollars?|What is the remainder when {n} is divided by {n}?|Simplify (x^2 - {n}) / (x + {n}).|A shop sold {n} {x} on Monday and twice as many on Tuesday. How many were sold altogether?
Let G be a finite group of order {n}. Show that it has a subgroup of index 2.|What is the expected value of a fair die?|The ratio of boys to girls is {n}:{n}. There are {n} girls. How many boys are there?\n{o}|A tank fills in {n} minutes and empties in {n}. When is it full?|simple interest on {n} dollars for {n} years at {n}% per annum\n{o}""",
    "structured_output": r"""Return a JSON object with the fields name and age: {s}|Generate a JSON that conforms to this schema:\n{h}|Output valid JSON only. {h}|Fill this JSON schema with an example.\n\n{h}|Convert the following to YAML: {s}|Give me a CSV table with columns country, capital, population.
Answer in JSON format: which are the three largest rivers?|You have these tools:\n{f}\n\nUser: what is the weather in Paris? Respond with a function call.|Call the right function for this request: book a flight to Rome on Friday.\n{f}|Nothing but JSON, please: five facts about {t}.
Produce XML for this order: {s}|{t}, as a JSON list of objects with keys title and year|Use one of the functions below to answer. Convert {n} dollars to euros.\n\n{f}|Available functions: {f}\nRequest: cancel my flight|Respond with a JSON array of strings.|Write a JSON document that validates against the schema below.\n{h}
How far is it from Oslo to Bergen?\n\nTools: {f}|I parse your reply with a program, so answer with a JSON object about {t}.""",
    "rag": r"""Context: {text}\n\nQuestion: {q}\nAnswer:|Answer the question based on the passage below.\n\n{text}\n\n{q}|Use the following documents to answer.\n[1] {text}\n[2] {text}\nQuestion: {q}|{text}\n\nQ: {q}\nA:|Read the text and answer: {q}\n\n{text}|According to the article, {q}\n{text}
Given the paragraph, answer the question that follows. If it is not in the text, say so.\n{text}\n{q}|{q}\n\nUse only this information: {text}|{text}\n\nBased on the text above: {q}|Question: {q} Context: {text}|Background: {text}\nWith this background, {q}|Question about a text: {q}\n\n{text}
{q} Answer from this paragraph only: {text}|Here are search results:\n{text}\n{text}\nAnswer the user's question: {q}|Reference document:\n{text}\n\nUser question: {q}|I read this: {text} {q}|{text}\nAnswer this question about the above: {q}""",
    "qa": r"""What is {t}?|who invented the telephone|when was the eiffel tower built|what is the capital of australia|Who wrote Pride and Prejudice?|Why is the sky blue?|How does {t} work?|Explain {t} in simple terms.|What are the causes of {t}?|Describe the history of {t}.|where do penguins live
What are the benefits of {t}?|who sang the original version of hallelujah|how many players are in a basketball team|what does dna stand for|Compare {t} and {t}.|What are the main differences between cats and dogs?|Tell me about {t}.|when did the second world war end|who plays the doctor in the new series
What is the boiling point of water?|who is the current president of france|What are the pros and cons of {t}?|how long is the great wall of china|Give me an overview of {t}|name three rivers in Africa|where was the 2012 olympics held|which planet is the largest|What is meant by the term inflation?
who won the world cup in 1998|what year did the titanic sink|Is it true that bats are blind?|who has the most home runs in baseball|What is the role of the supreme court?|How do vaccines affect the body?|the first person to walk on the moon|who does the voice of the lion in the film|Can you explain {t} to me?|what is the meaning of the name sarah""",
    "reasoning": r"""What would happen if the moon disappeared? Explain your reasoning.|What if {t} had never existed?|All cats are mammals. Some mammals swim. Does it follow that some cats swim?|Solve this riddle: what has keys but cannot open locks?|Where would you put a plate after eating? Choose the best answer:\n{h2}
Pick the most likely option.\n{p} was cold, so {p} put on what?\n{h2}|Here is a puzzle: three people stand in a row, {p} is not first. Who is in the middle?|What follows from this? Metals conduct heat, and a spoon is made of metal.\n{h2}|{p} pushed the car on ice and then on sand. On which did it go further? {h2}
Why might {p} have left the party early?\n{text}\nOptions:\n{h2}|How could one test whether {t} causes harm? Think step by step.|If it takes five machines five minutes, what about a hundred? Explain.|What might be the implications of {t}? Consider several scenarios.|You overtake the second runner in a race. What is your position?
Use common sense to answer: what do people do when they are thirsty?\n{h2}|Which conclusion is best supported?\n{s}\n{h2}|Logic puzzle: the red house is left of the blue one. Where is the green one? {h2}|What may happen next?\n{s}\n{h2}|Think about cause and effect: {s} What will {p} feel?|The heavier the ball, the faster it rolls. Which ball is heavier? {h2}|Suppose {t} ended tomorrow. What would change?|{s} What is a plausible reason for this?\n{h2}|Is the argument valid? All birds fly; penguins are birds; so penguins fly.|Analogy: hand is to glove as foot is to what?""",
    "chat": r"""Hi, how are you?|hello there|What should I cook tonight?|I feel tired all the time, what can I do?|Can you recommend a good book?|Imagine you are a pirate. Introduce yourself.|I want you to act as a job interviewer.|My friend is angry with me. What should I do?|Give me some tips for a first date.
User: Hi!\nAssistant: Hello, how can I help?\nUser: I need a gift for my mother.|I am planning a trip to Italy in May, any advice?|what do you think about pineapple on pizza|Pretend to be my grandmother and comfort me.|let's play a game|Thanks! And what about the second one?|Do you have feelings?|I'm bored
User: Which laptop should I buy?\nAssistant: It depends on your needs.\nUser: Mostly for games, under 1000 euros.|How do I ask my boss for a raise?|I can't decide between two jobs, help me.|You are a wizard in a tower. What do you tell a visitor?|Can you help me plan my week?|What's your favourite film?
Should I get a cat or a dog?|my girlfriend broke up with me and i don't know what to do|i want to learn the guitar, where do i start|Any ideas for my daughter's birthday party?|Tell me a joke|What can you do?|How would you spend a rainy Sunday?|As a superhero, how would you explain your powers to a child?|I need help with my garden, it is full of weeds
User: can you explain that again\nAssistant: Sure.\nUser: ok thanks, and what if it rains?|good morning! how do i get better at small talk""",
}
_CHINESE: dict[str, str] = {
    "summarization": r"总结下面的文章：{text}|请概括以下内容的主要观点。\n{text}|{text}\n用一句话总结。|为这篇文章写一个摘要：{text}|归纳上文要点：{text}|请用不超过五十字概述：{text}|{text}\n以上内容的大意是什么？|给出下文的中心思想：{text}|简要总结这段话\n{text}",
    "translation": r"把这句话翻译成英语：{s}|翻译成日语：{s}|将下列句子译成英文。\n{s}|请把下面的中文翻译为法语：{s}|Translate into Chinese: The weather is nice today.|把以下英文翻译成中文：{e}|“{s}”用英语怎么说？|翻译：{e}|请将这段文字翻成德文\n{s}",
    "rewriting": r"改写这句话：{s}|请把下面的句子改得更正式：{s}|润色以下文字：{s}|换一种说法：{s}|修改病句：{s}|把这段话缩短：{s}|用更简单的语言重写：{text}|将下面的主动句改为被动句：{s}|给定一句话，请重新组织它的语序：{s}|纠正下面句子中的语法错误。\n{s}|把句子中的形容词替换成近义词：{s}|对这段文字进行编辑，使其更加通顺：{text}|请将下列句子改成疑问句：{s}",
    "extraction": r"从下面的文本中提取人名和地名：{text}|找出文中所有的日期。\n{text}|抽取关键词：{text}|列出这段话中提到的机构名称：{text}|提取下面简历中的姓名、学校和工作：{s}|识别句子中的实体：{s}|文中出现了哪些数字？请列出来。\n{text}|从以下信息中找出产品名称和价格：{s}|根据下面的文本，抽取事件的时间、地点和人物。\n{text}|给定一段文字，找出其中的动词：{s}",
    "classification": r"判断这条评论的情感是正面还是负面：{s}|将以下文本分类：{s}|下面的新闻属于哪个类别？体育、财经、科技、娱乐\n{text}|这句话是积极的还是消极的？{s}|对下列物品进行分类：苹果，汽车，香蕉，飞机|判断两句话的意思是否相同：{s} {s}|识别用户的意图：{s}|这封邮件是垃圾邮件吗？{s}|给下面的文章打上主题标签：{text}|把这些动物按照哺乳类和鸟类归类：猫、麻雀、狗、鹰",
    "creative_writing": r"写一首关于{t}的诗。|写一篇关于{t}的作文|编一个故事，主角是{t}。|请以“{t}”为题写一篇散文|为{t}写一句广告语|写一封给朋友的信，谈谈{t}|创作一段关于{t}的对话|请写一篇演讲稿，主题是{t}。|续写下面的故事：{s}|给定以下关键词，写一段短文：{t}，{t}，{t}|帮我写一个关于{t}的小红书文案|为公司年会写一段开场白|写一个介绍{t}的宣传文案。|根据主题“{t}”生成一篇新闻报道|请写一份关于{t}的报告|围绕{t}写一个短剧本|以{t}为例，写一段议论文|给{t}起五个有创意的名字|写一封求职信|给出对联的下联",
    "code": r"用Python写一个冒泡排序。|编写一个函数，判断一个数是否为质数|这段代码有什么问题？\n{c}|写一个SQL查询，找出销量最高的商品|请解释以下代码的作用：{c}|用Java实现一个单例模式|如何用JavaScript获取当前时间？|下面的程序输出什么？\n{c}|实现一个C++类，表示二叉树|写一段HTML代码，显示一个按钮。|修复这段代码的错误：{c}|写一个正则表达式匹配手机号码|请用python实现一个计算器",
    "math_reasoning": r"小明有{n}个苹果，又买了{n}个，一共有多少个？|一列火车每小时行{n}千米，{n}小时行多少千米？|解方程：{n}x+{n}={n}|一个长方形长{n}厘米，宽{n}厘米，面积是多少？|商店运来{n}箱牛奶，每箱{n}瓶，卖出{n}瓶，还剩多少瓶？|甲数是{n}，比乙数多{n}，乙数是多少？|计算：{n}×{n}+{n}|修一条路，已经修了{n}米，还剩{n}%，这条路全长多少米？|求{n}和{n}的最大公约数|学校有男生{n}人，女生是男生的{n}倍，全校有多少人？|每本书{n}元，买{n}本便宜{n}元，要付多少钱？|掷两枚骰子，点数之和为7的概率是多少？|妈妈今年{n}岁，是女儿的{n}倍，女儿几岁？|小红看一本{n}页的书，每天看{n}页，几天看完？",
    "structured_output": r"以JSON格式输出：{s}|请按照下面的JSON schema生成数据：{h}|将以下信息转换成JSON：{s}|输出一个CSV表格，列为姓名、年龄、城市|用YAML表示下面的配置：{s}|调用合适的函数回答用户的问题：北京今天天气怎么样？\n{f}",
    "rag": r"根据下面的文章回答问题。\n{text}\n问题：{q}|阅读以下材料，回答：{q}\n{text}|{text}\n根据以上内容，{q}|请依据下列文本回答问题：{q}文本：{text}|已知信息：{text}\n请回答：{q}|{q}请从下文中找出答案。{text}|参考文档：{text}\n用户问题：{q}|基于上述对话回答：{q}\n甲：{s}\n乙：{s}",
    "qa": r"什么是{t}？|为什么天空是蓝色的？|{t}的历史是怎样的？|谁发明了电话？|中国最长的河流是哪条？|解释一下{t}的原理。|{t}有哪些好处？|如何看待{t}？|请介绍{t}|世界上最高的山是什么？|水的沸点是多少度？|{t}和{t}有什么区别？|请列举三种可再生能源。|为什么要重视{t}？|怎样才能学好英语？|描述一下{t}的特点|第二次世界大战是哪年结束的？|回答问题：{t}对社会有什么影响？|给出{t}的定义|如何提高{t}的效率？|请说明{t}为什么重要|地球绕太阳一圈需要多长时间？|{t}会带来什么问题？|哪些食物富含维生素C？|回答下面的常识问题：太阳从哪边升起？",
    "reasoning": r"如果没有{t}，世界会怎样？|推理题：甲说乙在说谎，乙说丙在说谎，谁说的是真话？|下列选项中哪一个最合理？\nA. 左边\nB. 右边|请一步一步地推断结论：所有的鸟都会飞，企鹅是鸟。|谜语：什么东西越洗越脏？|根据常识判断接下来会发生什么：{s}|逻辑题：三个人排队，小王不在最前面，谁在中间？",
    "chat": r"你好|你今天心情怎么样？|我最近失眠，怎么办？|推荐几本好看的小说吧|我想去云南旅游，有什么建议？|陪我聊聊天|假设你是一位老师，和我打个招呼。|我和女朋友吵架了，该怎么办？|谢谢你的帮助！|用户：你好\n助手：你好，有什么可以帮您？\n用户：我想买一部手机。|你会做什么？|晚饭吃什么好呢",
}
_ZH_QUESTIONS = r"这件事发生在什么时候？|作者的主要观点是什么？|他是哪里人？|为什么会出现这种情况？|专家提出了什么建议？|一共有几类？|结果怎么样？|谁最先提出的？"

_SLOT = re.compile(r"\{(text|s|t|p|l|n|x|y|q|m|b|c|d|h2|h|f|o|e)\}")
_NUMBERS = (2, 3, 4, 5, 7, 8, 12, 15, 20, 24, 36, 48, 60, 90, 120, 250, 400)


def _options(text: str) -> tuple[str, ...]:
    """Parted by "|" or a line break; a line break within one is written out."""
    parts = (one.strip() for one in re.split(r"[|\n]", text))
    return tuple(one.replace("\\n", "\n").replace('\\"', '"') for one in parts if one)


_ENGLISH_SLOTS = {
    "text": _options(_PASSAGES), "s": _options(_SENTENCES), "t": _options(_TOPICS), "p": _options(_PEOPLE),
    "l": _options(_LANGUAGES), "x": _options(_THINGS), "y": _options(_THINGS), "q": _options(_QUESTIONS),
    "m": _options(_MESSAGES), "b": _options(_LABELS), "c": _options(_CODE), "d": _options(_TABLES),
    "h": _options(_SCHEMAS), "f": _options(_TOOLS), "h2": _options(_CHOICES), "o": _options(_NUMBER_CHOICES),
    "n": tuple(map(str, _NUMBERS)),
}  # fmt: skip
_CHINESE_SLOTS = _ENGLISH_SLOTS | {
    "text": _options(_ZH_PASSAGES), "s": _options(_ZH_SENTENCES), "t": _options(_ZH_TOPICS),
    "q": _options(_ZH_QUESTIONS), "e": _options(_SENTENCES),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Material:
    """A text that instructions can be about, and the collected source it was taken from."""

    text: str
    source: str
    language: str


@dataclass(frozen=True, slots=True)
class MadeUp:
    """A prompt; ``source`` is where its material was taken from, empty for material of ours."""

    text: str
    task: str
    language: str
    source: str


_LONG = {"en": 260, "zh": 60}
"""From so many characters on a material is a passage rather than a sentence."""
_OWN = 0.3
"""Share of prompts about material of ours."""


def made_up(
    per_task: int, per_task_chinese: int, materials: Sequence[Material] = (), seed: int = 0
) -> list[MadeUp]:
    """``per_task`` English and ``per_task_chinese`` Chinese prompts of each task, mostly about ``materials``.

    The same texts under the instructions of all tasks: what is learnt is the instruction, not the material.
    """
    rng = random.Random(seed)
    rows = []
    for language, patterns, own, number in (
        ("en", _ENGLISH, _ENGLISH_SLOTS, per_task),
        ("zh", _CHINESE, _CHINESE_SLOTS, per_task_chinese),
    ):
        mine = [one for one in materials if one.language == language]
        for task, text in patterns.items():
            options = _options(text)
            for index in range(number):
                slots, source = own, ""
                if mine and rng.random() > _OWN:
                    material = rng.choice(mine)
                    long = len(material.text) >= _LONG[language]
                    slots, source = own | {"text" if long else "s": (material.text,)}, material.source
                pattern = options[index % len(options)]
                if source and not ("{text}" in pattern or "{s}" in pattern):
                    source = ""
                rows.append(MadeUp(_varied(_filled(pattern, slots, rng), rng), task, language, source))
    return rows


def _filled(pattern: str, slots: Mapping[str, Sequence[str]], rng: random.Random) -> str:
    return _SLOT.sub(lambda match: rng.choice(slots[match.group(1)]), pattern)


def _varied(text: str, rng: random.Random) -> str:
    """As people type: now and then in lower case, without the last mark, with a word of courtesy."""
    chance = rng.random()
    if chance < 0.1:
        return text.lower()
    if chance < 0.2:
        return text.rstrip(".?")
    if chance < 0.25 and text[:1].isascii():
        return rng.choice(("Please help: ", "Hi! ", "Could you do this for me? ", "Task: ")) + text
    return text
